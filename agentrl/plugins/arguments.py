"""Converts the JSON schemas of tools' arguments to those shown to the model: references inlined, and no
titles that pydantic derives from names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from pydantic import BaseModel
from pydantic.errors import PydanticUserError

from agentrl.errors import PluginError
from agentrl.types import JsonObject

MAX_NODES = 10_000
"""Definitions that refer to each other twice grow exponentially when they are inlined."""


def arguments_schema(arguments: type[BaseModel], notes: Mapping[str, str], *, label: str) -> JsonObject:
    """Return the schema of the arguments object.

    A parameter's description is its `Field(description=...)`, or else a text in its `Annotated`, or else the
    text in `notes` (parameter -> text), which come from the docstring. Nested models are `inlined`.

    Raises:
        PluginError: a parameter's type has no JSON schema.
    """
    try:
        schema = arguments.model_json_schema(by_alias=True)
    except PydanticUserError as error:
        raise PluginError(
            f"{label}: a parameter has no JSON schema: {' '.join(str(error).split())}"
        ) from error
    schema["$defs"] = {name: _without_titles(one) for name, one in schema.pop("$defs", {}).items()}
    schema = {"type": "object", "properties": {}, **_without_titles(schema)}
    for field in arguments.model_fields.values():
        name = str(field.alias)
        annotated = next((text for text in field.metadata if isinstance(text, str)), None)
        if (text := annotated or notes.get(name)) is not None:
            schema["properties"][name].setdefault("description", " ".join(text.split()))
    return inlined(schema)


def inlined(schema: JsonObject) -> JsonObject:
    """Return a schema with its references replaced by what they refer to, because chat templates and small
    models do not follow references.

    References of recursive definitions stay. A schema that would have more than MAX_NODES nodes, or a chain
    of a thousand references, is returned as it is.
    """
    definitions = {
        f"#/{section}/{name}": definition
        for section in ("$defs", "definitions")
        if isinstance(schema.get(section), Mapping)
        for name, definition in schema[section].items()
    }
    bare = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}
    nodes = iter(range(MAX_NODES))
    try:
        whole: dict[str, Any] = _inline(bare, definitions, frozenset(), nodes)
        kept = _references(whole)
        for reference in sorted(kept & definitions.keys()):
            section, _, name = reference.removeprefix("#/").partition("/")
            definition = _inline(definitions[reference], definitions, kept | {reference}, nodes)
            whole.setdefault(section, {})[name] = definition
    except (_TooLarge, RecursionError):
        return schema
    return whole


class _TooLarge(Exception):
    """The schema would have more than MAX_NODES nodes."""


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


def _inline(node: Any, definitions: Mapping[str, Any], opened: Set[str], nodes: Iterator[int]) -> Any:
    """Return `node` with references replaced by their definitions, except recursive references (to `opened`).

    Raises:
        _TooLarge: `nodes` ends.
    """
    if next(nodes, None) is None:
        raise _TooLarge
    if isinstance(node, list):
        return [_inline(item, definitions, opened, nodes) for item in node]
    if not isinstance(node, dict):
        return node
    reference = node.get("$ref")
    if isinstance(reference, str) and reference not in opened:
        definition = definitions.get(reference)
        if isinstance(definition, dict):
            rest = {key: value for key, value in node.items() if key != "$ref"}
            return _inline({**definition, **rest}, definitions, opened | {reference}, nodes)
    return {key: _inline(value, definitions, opened, nodes) for key, value in node.items()}


def _references(node: Any) -> Set[str]:
    """Return the references that `node` still has."""
    if isinstance(node, list):
        return {name for item in node for name in _references(item)}
    if not isinstance(node, dict):
        return set()
    reference = node.get("$ref")
    own = {reference} if isinstance(reference, str) else set()
    return own | {name for value in node.values() for name in _references(value)}
