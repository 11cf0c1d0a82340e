"""Types for arguments that a format writes as bare text, chosen by the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agentrl.chat.formats.json_calls import is_too_deep
from agentrl.chat.parsing import Tools

ANY = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})

MAX_REFERENCES = 8
"""Maximum nesting of `$ref`s and unions; a schema may refer to itself."""

_SPELLINGS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
"""Templates write these values with Jinja's `string` filter, which spells them as Python does."""


def typed(text: str, tools: Tools, tool: str, parameter: str) -> Any:
    """Return the value of an argument written as `text`.

    The text is converted to the type that it reads as, if the schema allows that type. Otherwise it stays
    text, and the check of the arguments reports the error. Without a schema, text that is valid JSON is
    parsed, except a JSON string.
    """
    types = parameter_types(tools, tool, parameter)
    if types == {"string"}:
        return text
    value = _SPELLINGS.get(text.strip(), text)
    if value is text:
        value = _json_or_text(text)
    return value if types & _types_of(value) else text


def parameter_types(tools: Tools, tool: str, parameter: str) -> frozenset[str]:
    """Return the JSON types that a tool's schema allows for a parameter.

    Returns all types if the schema names none.
    """
    for shown in tools:
        function = shown.get("function", {})
        if function.get("name") == tool:
            schema = function.get("parameters")
            properties = schema.get("properties") if isinstance(schema, Mapping) else None
            return (
                _allowed(properties.get(parameter), schema, MAX_REFERENCES)
                if isinstance(properties, Mapping)
                else ANY
            )
    return ANY


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
