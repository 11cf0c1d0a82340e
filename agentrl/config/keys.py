"""The schema as a tree of keys, for looking up what a config file may contain."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from agentrl.config.section import Section

Key = tuple[str, ...]


def section_type(field: FieldInfo) -> type[Section] | None:
    """Return the Section class of a field that is a nested section; None for a single key."""
    annotation = field.annotation
    return annotation if inspect.isclass(annotation) and issubclass(annotation, Section) else None


def entry_type(field: FieldInfo) -> type[Section] | None:
    """Return the Section class of a mapping's values (`agent.tool_limits.<name>`).

    Returns None for any other field.
    """
    arguments = get_args(field.annotation) if get_origin(field.annotation) is dict else ()
    return (
        arguments[1]
        if arguments and inspect.isclass(arguments[1]) and issubclass(arguments[1], Section)
        else None
    )


def iter_keys(schema: type[Section], prefix: Key = ()) -> Iterator[tuple[Key, FieldInfo]]:
    """Yield every single key of the schema, depth first in schema order, without the sections themselves."""
    for name, field in schema.model_fields.items():
        nested = section_type(field)
        if nested is None:
            yield (*prefix, name), field
        else:
            yield from iter_keys(nested, (*prefix, name))


def iter_sections(schema: type[Section], prefix: Key = ()) -> Iterator[tuple[Key, type[Section]]]:
    """Yield every section below the schema, parents before children.

    `<name>` is a placeholder for an entry of a mapping.
    """
    for name, field in schema.model_fields.items():
        nested, entry = section_type(field), entry_type(field)
        if nested is not None:
            yield (*prefix, name), nested
            yield from iter_sections(nested, (*prefix, name))
        elif entry is not None:
            yield (*prefix, name, "<name>"), entry


def keys_beside(schema: type[Section], key: Key) -> list[Key]:
    """Return the keys of the section that an unknown key is written in: also of an entry of a mapping."""
    section, parts = schema, iter(key[:-1])
    path: Key = ()
    for part in parts:
        field = section.model_fields.get(part)
        nested, entry = (None, None) if field is None else (section_type(field), entry_type(field))
        if nested is not None:
            section, path = nested, (*path, part)
        elif entry is not None and (name := next(parts, None)) is not None:
            section, path = entry, (*path, part, name)
        else:
            return []
    return [(*path, name) for name in section.model_fields]


def unknown_keys(
    schema: type[Section], values: Mapping[str, Any], prefix: Key = ()
) -> Iterator[tuple[Key, Any]]:
    """Yield each key of `values` that the schema does not have, with its value.

    Free-form mappings are not searched.
    """
    for name, value in values.items():
        key = (*prefix, str(name))
        field = schema.model_fields.get(str(name))
        if field is None:
            yield key, value
            continue
        nested, entry = section_type(field), entry_type(field)
        if nested is not None and isinstance(value, Mapping):
            yield from unknown_keys(nested, value, key)
        elif entry is not None and isinstance(value, Mapping):
            for entry_name, written in value.items():
                if isinstance(written, Mapping):
                    yield from unknown_keys(entry, written, (*key, str(entry_name)))


def with_defaults(
    schema: type[Section], values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return `values` completed by the schema's defaults, as plain data.

    An empty section (null) counts as not set. Null for a free-form mapping empties the mapping: mappings are
    merged along a `defaults` list, so a file has no other way to remove what an earlier file set.
    """
    defaults = schema().model_dump(mode="json") if defaults is None else defaults
    complete: dict[str, Any] = dict(values)
    for name, field in schema.model_fields.items():
        nested = section_type(field)
        if name not in values or (nested is not None and values[name] is None):
            complete[name] = defaults[name]
        elif values[name] is None and get_origin(field.annotation) is dict:
            complete[name] = {}
        elif nested is not None and isinstance(values[name], Mapping):
            complete[name] = with_defaults(nested, values[name], defaults[name])
    return complete
