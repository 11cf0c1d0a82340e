"""Schemas of tools as they are shown to the model."""

from __future__ import annotations

import json

import pytest

from agentrl.plugins.arguments import MAX_NODES, inlined


@pytest.mark.parametrize("section", ["$defs", "definitions"])
def test_references_are_replaced(section):
    schema = {
        "type": "object",
        "properties": {
            "place": {"$ref": f"#/{section}/Place", "description": "where"},
            "all": {"type": "array", "items": {"$ref": f"#/{section}/Place"}},
        },
        section: {
            "Place": {"type": "object", "properties": {"city": {"$ref": f"#/{section}/City"}}},
            "City": {"type": "string"},
        },
    }
    place = {"type": "object", "properties": {"city": {"type": "string"}}}
    assert inlined(schema) == {
        "type": "object",
        "properties": {
            "place": {**place, "description": "where"},
            "all": {"type": "array", "items": place},
        },
    }


@pytest.mark.parametrize("section", ["$defs", "definitions"])
def test_recursive_and_foreign_references_stay(section):
    tree = {"type": "object", "properties": {"left": {"$ref": f"#/{section}/Tree"}}}
    foreign = {"$ref": "https://example.com/schema.json"}
    schema = {
        "properties": {"tree": {"$ref": f"#/{section}/Tree"}, "other": foreign},
        section: {"Tree": tree},
    }
    shown = inlined(schema)
    assert shown["properties"] == {"tree": tree, "other": foreign}
    assert shown[section] == {"Tree": tree}


def test_a_schema_that_would_grow_without_end_stays():
    doubled = {
        f"D{level}": {"properties": {side: {"$ref": f"#/$defs/D{level + 1}"} for side in ("a", "b")}}
        for level in range(30)
    }
    schema = {"properties": {"x": {"$ref": "#/$defs/D0"}}, "$defs": {**doubled, "D30": {"type": "string"}}}
    assert inlined(schema) is schema
    assert len(json.dumps(inlined(schema))) < MAX_NODES


def test_a_schema_without_references_is_the_same():
    schema = {"type": "object", "properties": {"a": {"type": "string", "title": "A"}}}
    assert inlined(schema) == schema
