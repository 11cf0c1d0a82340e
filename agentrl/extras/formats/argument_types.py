"""Types for arguments that a format writes as bare text, chosen by the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from agentrl.chat.formats.json_calls import is_too_deep
from agentrl.chat.parsing import Tools
from agentrl.extras.formats.python_literals import NotPython, read_literal

ANY = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})

MAX_REFERENCES = 8
"""Maximum nesting of `$ref`s and unions; a schema may refer to itself."""

_WORD = re.compile(r"[\w.-]+>?")
_SPELLINGS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
"""Templates write these values with Jinja's `string` filter, which spells them as Python does."""


def typed(text: str, tools: Tools, tool: str, parameter: str) -> Any:
    """Return the value of an argument written as `text`.

    The text is converted to the type that it reads as, if the schema allows that type. Otherwise it stays
    text, and the check of the arguments reports the error. Without a schema, text that is valid JSON is
    parsed, except a JSON string. Lists and objects may be spelt as in Python where the schema names their
    type.
    """
    types = parameter_types(tools, tool, parameter)
    if types == {"string"}:
        return text
    value = _SPELLINGS.get(text.strip(), text)
    if value is text:
        value = _json_or_text(text)
    if value is text and "string" not in types and types & {"array", "object"}:
        value = _literal_or_text(text)
    return value if types & _types_of(value) else text


def swallowed(value: str, tags: re.Pattern[str], tools: Tools, tool: str) -> str | None:
    """Return the parameter that begins inside `value`, because a tag between them is missing; None if there
    is none.

    `tags` matches closing tags, and opening tags with the parameter's name as group 1. A value may itself be
    text of calls: then its tags are balanced, and name no parameter of the tool's schema. It may also mention
    a closing tag, but no parameter of the schema behind it.
    """
    begun: list[str] = []
    level, behind = 0, None
    for tag in tags.finditer(value):
        level += -1 if tag[1] is None else 1
        if tag[1] is not None:
            begun.append(tag[1].strip())
        elif level < 0 and behind is None:
            behind = tag.end()
    known = parameter_schemas(tools, tool)
    is_balanced = level <= 0 and behind is None
    if (name := next((name for name in begun if name in known or not is_balanced), None)) is not None:
        return name
    if behind is None:
        return None
    tag_ends = tuple(f"{name}>" for name in known)
    words = (word[0] for word in _WORD.finditer(value, behind))
    return next((word.rstrip(">") for word in words if word in known or word.endswith(tag_ends)), None)


def parameter_types(tools: Tools, tool: str, parameter: str) -> frozenset[str]:
    """Return the JSON types that a tool's schema allows for a parameter.

    Returns all types if the schema names none.
    """
    schema = _schema(tools, tool)
    return _allowed(parameter_schemas(tools, tool).get(parameter), schema, MAX_REFERENCES)


def parameter_schemas(tools: Tools, tool: str) -> Mapping[str, Any]:
    """Return the schemas of a tool's parameters by name; {} if its schema names none."""
    properties = _schema(tools, tool).get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _schema(tools: Tools, tool: str) -> Mapping[str, Any]:
    functions = (shown.get("function", {}) for shown in tools)
    schema = next((one.get("parameters") for one in functions if one.get("name") == tool), None)
    return schema if isinstance(schema, Mapping) else {}


def _allowed(schema: Any, root: Any, depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return ANY
    if isinstance(reference := schema.get("$ref"), str):
        return _allowed(_resolve(reference, root), root, depth - 1)
    if "type" in schema:
        types = schema["type"]
        return frozenset([types] if isinstance(types, str) else map(str, types))
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        return frozenset().union(*map(_types_of, values))
    for union in ("anyOf", "oneOf", "allOf"):
        if isinstance(choices := schema.get(union), list):
            return frozenset().union(*(_allowed(choice, root, depth - 1) for choice in choices))
    return ANY


def _resolve(reference: str, root: Any) -> Any:
    """Return the target of a reference within the schema (`#/$defs/Name`); None if it does not exist."""
    place = root
    for key in reference.removeprefix("#/").split("/"):
        place = place.get(key) if isinstance(place, Mapping) else None
    return place


def _json_or_text(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) or is_too_deep(value, text) else value


def _literal_or_text(text: str) -> Any:
    try:
        return read_literal(text)
    except NotPython:
        return text


def _types_of(value: Any) -> frozenset[str]:
    """Return the JSON types that `value` fits."""
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number"})
    return frozenset(
        {"object" if isinstance(value, dict) else "array" if isinstance(value, list) else "string"}
    )
