"""Write docs/config.md from the schema: `python -m agentrl.extras.plan.config_reference [FILE]`."""

from __future__ import annotations

import enum
import inspect
import re
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import yaml
from pydantic import AfterValidator
from pydantic.fields import FieldInfo

from agentrl.config.keys import Key, iter_sections, section_type
from agentrl.config.named_fields import NameIn
from agentrl.config.schema import Config
from agentrl.config.section import Section
from agentrl.errors import ConfigError
from agentrl.extras.supervised.config import RMConfig, SFTConfig

DEFAULT_FILE = "docs/config.md"

INTRODUCTION = """\
# Configuration

*Reference page: every key of the configuration, to be looked up rather than read.* Generated from the sections in
`agentrl/config/` by `make docs`; do not edit by hand.

A config file is YAML and holds only what differs from the defaults below. Keys are written in sections
(`trainer: {steps: 20}`) or on the command line (`agentrl train run.yaml trainer.steps=20`), in
[Hydra's grammar](https://hydra.cc/docs/advanced/override_grammar/basic/): `key=value`, lists `key=[a,b]`, mappings
`key={a: 1}`, `~key` to take back what a file sets. A file may build on others by a `defaults` list; they are looked
for in its own folder, then among the packaged `configs/`. Mappings are merged along the list; null empties one,
and so does `key={}` among the overrides. A text that begins with `~/` is a path in your home folder.
`${oc.env:NAME}` inserts an environment variable, `${section.key}` another key. Paths are relative to the working
directory. An unknown key is refused.

`agentrl config show FILE` prints the resolved config, `agentrl config explain FILE` what it amounts to.
Units are suffixes: `_s` seconds, `_tokens`, `_bytes`.
"""  # noqa: E501

WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    Any: "anything",
}


def render() -> str:
    """Return the text of docs/config.md."""
    parts = [
        INTRODUCTION,
        "# Training: `agentrl train`\n",
        *(_section(key, section, Config()) for key, section in iter_sections(Config)),
        *_further("# Supervised training: `agentrl sft`\n", SFTConfig, known=[Config]),
        *_further("# Reward models: `agentrl rm`\n", RMConfig, known=[Config, SFTConfig]),
    ]
    return "\n".join(parts)


def _further(title: str, config: type[Section], *, known: Sequence[type[Section]]) -> list[str]:
    """Return the part for `config`.

    Sections that it shares with the `known` configs are listed, but not repeated.
    """
    shared = {section for other in known for _, section in iter_sections(other)}
    same = ", ".join(
        f"`{'.'.join(key)}`" for key, section in iter_sections(config) if section in shared and len(key) == 1
    )
    own = [_section(key, section) for key, section in iter_sections(config) if section not in shared]
    return [title, f"The sections {same} are the same as above. The others are:\n", *own]


def _section(key: Key, section: type[Section], config: Section | None = None) -> str:
    """Return the part for a section.

    config: the defaults; None: those of the section's class.
    """
    own = _own_defaults(key, config)
    rows = "\n".join(
        f"| `{'.'.join((*key, name))}` | {type_words(field)} | {_default(own.get(name, field))} | "
        f"{_cell(field.description)} |"
        for name, field in _rows(section)
    )
    heading = f"{'#' * (len(key) + 1)} `{'.'.join(key)}`\n\n{inspect.cleandoc(section.__doc__ or '')}\n"
    return f"{heading}\n| key | type | default | meaning |\n|---|---|---|---|\n{rows}\n" if rows else heading


def _own_defaults(key: Key, config: Section | None) -> dict[str, Any]:
    """Return the values of the section at `key`, which may differ from the defaults of its class."""
    found: Any = config
    for part in key:
        found = getattr(found, part, None)
    return (
        {name: getattr(found, name) for name in type(found).model_fields}
        if isinstance(found, Section)
        else {}
    )


def _rows(section: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        if section_type(field) is None:
            yield name, field


def type_words(field: FieldInfo) -> str:
    """Return the type of a key in words, with its bounds: `whole number, at least 1`."""
    if (names := _names_in(field.metadata)) is not None:
        return names
    kinds = [_words(kind) for kind in _kinds(field.annotation) if kind is not type(None)]
    null = "" if type(None) not in _kinds(field.annotation) else ", or null" if field.metadata else " or null"
    return ", ".join([" or ".join(kinds), *_bounds(field)]) + null


def _kinds(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _words(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated and (names := _names_in(arguments[1:])) is not None:
        return names
    if origin is Literal:
        return " ".join(f"`{_yaml(choice)}`" for choice in arguments)
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return " ".join(f"`{member.value}`" for member in annotation)
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"list of {_words(arguments[0])}"
    if origin is tuple:
        return f"list of {len(arguments)} {_words(arguments[0])}s"
    if origin is dict:
        if inspect.isclass(arguments[1]) and issubclass(arguments[1], Section):
            return "mapping of names to the keys below"
        return (
            "mapping"
            if arguments[1] is Any
            else f"mapping of {_words(arguments[0])} to {_words(arguments[1])}"
        )
    return WORDS[annotation]


def _names_in(metadata: Sequence[Any]) -> str | None:
    """Return the names that a field may have, if packages register them."""
    checks = (bound.func for bound in metadata if isinstance(bound, AfterValidator))
    return next((check.words for check in checks if isinstance(check, NameIn)), None)


def _bounds(field: FieldInfo) -> Iterator[str]:
    for bound in field.metadata:
        if isinstance(bound, annotated_types.Ge):
            yield f"at least {bound.ge}"
        elif isinstance(bound, annotated_types.Gt):
            yield f"above {bound.gt}"
        elif isinstance(bound, annotated_types.Le):
            yield f"at most {bound.le}"
        elif isinstance(bound, annotated_types.Lt):
            yield f"below {bound.lt}"


def _default(value: Any) -> str:
    plain = value.default if isinstance(value, FieldInfo) else value
    return f"`{_cell(_yaml(_plain(plain)))}`"


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {_plain(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    return value


def _yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return re.sub(r"\n(\.\.\.\n)?$", "", text)


def _cell(text: str | None) -> str:
    """Return text for a table cell, with None written as YAML's null."""
    return re.sub(r"\bNone\b", "null", text or "").replace("|", "\\|")


def main() -> None:
    """Write the file named on the command line; docs/config.md by default."""
    file = Path(sys.argv[1] if len(sys.argv) > 1 else DEFAULT_FILE)
    if not file.parent.is_dir():
        raise ConfigError(
            f"folder {str(file.parent)!r} does not exist; run this from the root of the repository, or name "
            "a file"
        )
    file.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
