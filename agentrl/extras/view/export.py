"""One file with the page and the answers that it needs, to be attached to an issue or a paper.

The page's modules become one script, and its policy allows this script and this style only, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import orjson

from agentrl.data.atomic_files import write_atomically
from agentrl.errors import DataError
from agentrl.extras.view.app import Pages, asset, to_json
from agentrl.extras.view.attempt import ReadAttempt, exact_prompt, show
from agentrl.extras.view.attempts import Filters, Page
from agentrl.extras.view.shelf import Shelf
from agentrl.types import Trajectory

MAX_BYTES = 5_000_000
"""Of the file. If the attempts do not fit whole, the longest texts and rows of tokens are cut."""
MAX_POINTS = 300
PAGE = 50
"""Rows that the page asks for at once."""
MODULES = ("dom", "api", "charts", "run", "attempts", "attempt", "compare", "app")
_CUTS = (
    (4000, 20_000),
    (4000, 8000),
    (2000, 4000),
    (1000, 2000),
    (500, 1000),
    (200, 500),
    (50, 200),
    (0, 100),
)
"""Tokens of an attempt and characters of a text that are kept, from generous to least."""
_BYTES_OF_TOKEN = 12
"""At least, in JSON: id, mask, log-probability, version and turn."""
_CURVES = re.compile(
    r"rollout/(reward_mean|accuracy(/[^/]+)?|source/[^/]+/accuracy|tool_use(/needs_tool)?|lag/(mean|max)"
    r"|response_tokens/(mean|max)|dropped_groups)|attempts/[a-z_]+|time/[^/]+_s|idle/.+|speed/.+"
    r"|learner/(entropy|grad_norm|correction/kl_k3)|val/(reward_mean|mean@\d+(/low|/high)?)"
)
_IMPORT = re.compile(r'^import (\{.*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async function|function|const|class) (\w+))", re.MULTILINE)


def export(pages: Pages, file: Path, *, filters: Filters, limit: int) -> tuple[int, int]:
    """Write `file`; return the number of attempts in it and its bytes.

    Args:
        limit: most attempts of each source, in the order of the table.

    Raises:
        DataError: no attempt passes the filters, or all is too much for MAX_BYTES.
        InfrastructureError: the file cannot be written.
    """
    chosen = [_whole_page(shelf, filters, limit) for shelf in pages.shelves]
    count = sum(len(page.rows) for page in chosen)
    if not count and not any(shelf.source.kind == "run" for shelf in pages.shelves):
        raise DataError("no attempt passes the filters, so there is nothing to export")
    whole = [
        _Whole(number, _plain(show(shelf.attempts, row.key)), shelf.attempts.read(row.key))
        for number, (shelf, page) in enumerate(zip(pages.shelves, chosen, strict=True))
        for row in page.rows
    ]
    others = dict(_others(pages, chosen))
    for num_tokens, num_chars in _CUTS:
        if sum(one.least_bytes(num_tokens, num_chars) for one in whole) > MAX_BYTES:
            continue
        attempts = {key: value for one in whole for key, value in one.answers(pages, num_tokens, num_chars)}
        content = document({"answers": {**others, **attempts}})
        if len(content) <= MAX_BYTES:
            write_atomically(file, content.decode())
            return count, len(content)
    raise DataError(f"{count} attempts do not fit into {MAX_BYTES:,} bytes; export fewer with --limit")


@dataclass(frozen=True, slots=True)
class _Whole:
    """An attempt before it is cut: the number of its source, the answer, and what was read of it."""

    source: int
    shown: Mapping[str, Any]
    stored: ReadAttempt

    @property
    def own(self) -> Trajectory | None:
        return self.stored.trajectory

    def least_bytes(self, num_tokens: int, num_chars: int) -> int:
        """Return a number of bytes that the answers have at least."""
        texts = sum(min(num_chars, len(m["content"]["text"])) for m in self.shown["messages"])
        return texts + (0 if self.own is None else _BYTES_OF_TOKEN * min(num_tokens, self.own.num_tokens))

    def answers(self, pages: Pages, num_tokens: int, num_chars: int) -> Iterator[tuple[str, Any]]:
        shelf, number, key = pages.shelves[self.source], self.source, self.shown["key"]
        yield question("attempt", source=number, key=key), _cut(self.shown, num_chars)
        if self.own is not None and num_tokens:
            tokens = shelf.tokens(self.stored, count=num_tokens)
            yield question("tokens", source=number, key=key, start=0, count=4000), tokens
            prompt = _cut(_plain(exact_prompt(self.own, shelf.texts())), num_chars)
            yield question("prompt", source=number, key=key), prompt


def document(held: Mapping[str, Any]) -> bytes:
    """Return the page as one file that holds answers."""
    script, style = bundle(), _text("style.css")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    # in a script element nothing but `</script` and `<!--` is markup: no `<` is left
    data = to_json(held).decode().replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return (
        "<!doctype html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<title>agentrl view</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#main">Skip to the content</a>\n<header id="top"></header>\n'
        '<main id="main" tabindex="-1"></main>\n<div id="status" role="status" aria-live="polite"></div>\n'
        f'<script type="application/json" id="answers">{data}</script>\n'
        f'<script type="module">{script}</script>\n</body>\n</html>\n'
    ).encode()


def bundle() -> str:
    """Return the page's modules as one: each in a function of its own, which returns what it exports."""
    parts = ["const modules = {};"]
    for name in MODULES:
        code = _IMPORT.sub(r'const \1 = modules["\2"];', _text(f"{name}.js"))
        exported = [found[2] for found in _EXPORT.finditer(code)]
        code = _EXPORT.sub(r"\1", code)
        parts.append(
            f'modules["{name}"] = await (async () => {{\n{code}\nreturn {{ {", ".join(exported)} }};\n}})();'
        )
    script = "\n".join(parts)
    assert "</script" not in script
    assert "<!--" not in script
    return script


def question(name: str, **parameters: object) -> str:
    """Return a question as the page's `question` writes it, which is the key of its answer."""
    kept = sorted((key, str(value)) for key, value in parameters.items() if value not in ("", None))
    return f"{name}?{'&'.join(f'{_encoded(key)}={_encoded(value)}' for key, value in kept)}"


def _encoded(text: str) -> str:
    return quote_plus(text, safe="*-._").replace("~", "%7E")


def _text(name: str) -> str:
    content = asset(name)
    assert content is not None, name
    return content.decode()


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _whole_page(shelf: Shelf, filters: Filters, limit: int) -> Page:
    while True:
        page = shelf.table.page(filters, limit=limit)
        if page.is_complete or len(page.rows) == limit:
            return page


def _others(pages: Pages, chosen: list[Page]) -> Iterator[tuple[str, Any]]:
    """Yield the answers that are not of single attempts."""
    yield question("sources"), _plain(pages.answer("sources", {}))
    if len(pages.shelves) > 1:
        everyone = ",".join(str(number) for number in range(len(pages.shelves)))
        if all(shelf.source.kind == "run" for shelf in pages.shelves):
            yield question("compare", sources=everyone), _plain(pages.answer("compare", {}))
        elif len(pages.shelves) == 2:
            yield question("problems", sources=everyone), _plain(pages.answer("problems", {}))
    for number, (shelf, page) in enumerate(zip(pages.shelves, chosen, strict=True)):
        overview = _plain(shelf.run.overview())
        # where a run is on a disk, and what its config names there, is of no use to a reader elsewhere
        hidden = {"config": {}, "command": "", "servers": [], "actors": []}
        yield question("overview", source=number), {**overview, **hidden}
        for kind, known in (("train", "names"), ("validation", "validation_names")):
            names = [name for name in overview[known] if _CURVES.fullmatch(name)]
            curves = shelf.run.series(kind, names, max_points=MAX_POINTS)
            yield question("series", source=number, kind=kind), _plain(curves)
        rows = [{"key": row.key, **row.values} for row in page.rows]
        told = {"total": len(rows), "searched": 1, "of": 1, "is_complete": True}
        for offset in range(0, max(1, len(rows)), PAGE):
            part = {"rows": rows[offset : offset + PAGE], "offset": offset, **told}
            yield question("attempts", source=number, offset=offset, limit=PAGE), part


def _plain(value: Any) -> Any:
    return orjson.loads(to_json(value))


def _cut(value: Any, most: int) -> Any:
    """Return a value with every text cut; a cut text of the page still tells how long it was."""
    if isinstance(value, dict):
        return {name: _cut(inner, most) for name, inner in value.items()}
    if isinstance(value, list):
        return [_cut(inner, most) for inner in value]
    return value[:most] if isinstance(value, str) else value
