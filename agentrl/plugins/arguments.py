"""Converts pydantic's JSON schema of a tool's arguments to the one shown to the model: no titles, references
inlined.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from pydantic import BaseModel
from pydantic.errors import PydanticUserError

from agentrl.errors import PluginError
from agentrl.types import JsonObject

REFERENCE = "#/$defs/"


def arguments_schema(arguments: type[BaseModel], notes: Mapping[str, str], *, label: str) -> JsonObject:
    """Return the schema of the arguments object.

    A parameter's description is its `Field(description=...)`, or else a text in its `Annotated`, or else the
    text in `notes` (parameter -> text), which come from the docstring. Nested models are inlined, because
    chat templates and small models do not follow references. Only recursive models keep references.

    Raises:
        PluginError: a parameter's type has no JSON schema.
    """
    try:
        schema = arguments.model_json_schema(by_alias=True)
    except PydanticUserError as error:
        raise PluginError(
            f"{label}: a parameter has no JSON schema: {' '.join(str(error).split())}"
        ) from error
    definitions = {name: _without_titles(definition) for name, definition in schema.pop("$defs", {}).items()}
    schema = {"type": "object", "properties": {}, **_without_titles(schema)}
    for field in arguments.model_fields.values():
        name = str(field.alias)
        annotated = next((text for text in field.metadata if isinstance(text, str)), None)
        if (text := annotated or notes.get(name)) is not None:
            schema["properties"][name].setdefault("description", " ".join(text.split()))
    inlined: dict[str, Any] = _inline(schema, definitions, frozenset())
    if kept := _references(inlined):
        inlined["$defs"] = {
            name: _inline(definitions[name], definitions, kept | {name}) for name in sorted(kept)
        }
    return inlined


def _without_titles(schema: dict[str, Any]) -> dict[str, Any]:
    """Return an object's schema without the titles that pydantic derives from names, which only waste
    tokens.
    """
    bare = {key: value for key, value in schema.items() if key != "title"}
    if bare.get("type") == "object":
        properties = bare.get("properties", {})
        bare["properties"] = {
            name: {k: v for k, v in of.items() if k != "title"} for name, of in properties.items()
        }
    return bare


def _inline(node: Any, definitions: Mapping[str, Any], open_names: Set[str]) -> Any:
    """Return `node` with references replaced by their definitions, except recursive references (to
    `open_names`).
    """
    if isinstance(node, list):
        return [_inline(item, definitions, open_names) for item in node]
    if not isinstance(node, dict):
        return node
    reference = node.get("$ref")
    if isinstance(reference, str) and reference.startswith(REFERENCE):
        name = reference.removeprefix(REFERENCE)
        if name not in open_names and name in definitions:
            rest = {key: value for key, value in node.items() if key != "$ref"}
            return _inline({**definitions[name], **rest}, definitions, open_names | {name})
    return {key: _inline(value, definitions, open_names) for key, value in node.items()}


def _references(node: Any) -> Set[str]:
    """Return the names of all definitions that `node` still refers to."""
    if isinstance(node, list):
        return {name for item in node for name in _references(item)}
    if not isinstance(node, dict):
        return set()
    reference = node.get("$ref")
    own = (
        {reference.removeprefix(REFERENCE)}
        if isinstance(reference, str) and reference.startswith(REFERENCE)
        else set()
    )
    return own | {name for value in node.values() for name in _references(value)}
