"""`model.chat_template`: the name of a packaged template, or a Jinja file."""

from __future__ import annotations

import difflib
import functools
import re
from pathlib import Path

from tokenizers import Tokenizer

from agentrl.errors import ConfigError
from agentrl.plugins.sources import absence, locate

FOLDER = Path(__file__).parent / "templates"
PACKAGED = tuple(sorted(path.stem for path in FOLDER.glob("*.jinja")))
"""Names of the packaged templates."""

_CONTROL = re.compile(r"<\|\w+\|>|</?think>")
"""What must be a token: a model that reads it as a text of many tokens does not see a turn end."""


def find_template(chosen: str) -> Path:
    """Return the packaged template of the name `chosen`, or else the user's file on this machine.

    Raises:
        ConfigError: there is neither.
    """
    if chosen in PACKAGED:
        return FOLDER / f"{chosen}.jinja"
    file = locate(chosen)
    if file.is_file():
        return file
    if Path(chosen).name == chosen and not Path(chosen).suffix:
        close = difflib.get_close_matches(chosen, PACKAGED, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"no packaged template has the name {chosen!r}; {hint}packaged: {', '.join(PACKAGED)}; or name a "
            "Jinja file"
        )
    raise ConfigError(f"file {chosen!r} {absence(Path(chosen))}")


def missing_tokens(chosen: str, tokenizer: Tokenizer) -> list[str]:
    """Return the control tokens that a packaged template writes and the tokenizer does not have.

    A user's own file may write what it wants.
    """
    control = _control_tokens(chosen) if chosen in PACKAGED else ()
    return [token for token in control if tokenizer.token_to_id(token) is None]


def fitting_templates(tokenizer: Tokenizer) -> list[str]:
    """Return the names of the packaged templates whose control tokens the tokenizer has."""
    return [name for name in PACKAGED if not missing_tokens(name, tokenizer)]


@functools.cache
def _control_tokens(name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_CONTROL.findall(find_template(name).read_text(encoding="utf-8"))))
