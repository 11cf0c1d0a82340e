"""The list of registered plugins, as text or data (`agentrl plugins`)."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from agentrl.errors import PluginError
from agentrl.plugins.loaded import Plugins
from agentrl.plugins.registry import Registry
from agentrl.types import JsonObject


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """One plugin.

    source: the package or file it comes from. parameters: JSON schema of a tool's arguments. problem: why it
    does not load.
    """

    kind: str
    name: str
    source: str
    description: str
    parameters: JsonObject | None = None
    problem: str | None = None


def list_plugins(plugins: Plugins) -> list[PluginInfo]:
    """Return every registered plugin, by kind and name. One that does not load is listed with its problem."""
    for name in plugins.environments.names():
        with suppress(PluginError):  # listed with its problem
            plugins.environment(name)  # its methods become tools
    return [_describe(registry, name) for registry in plugins.registries for name in registry.names()]


def format_plugins(infos: Iterable[PluginInfo]) -> str:
    """Return the list as text: a block for each kind, a paragraph for each plugin."""
    lines: list[str] = []
    kind = ""
    for info in infos:
        if info.kind != kind:
            kind = info.kind
            lines += ["", f"{kind}s"] if lines else [f"{kind}s"]
        lines.append(f"  {info.name:<20} {info.source}")
        lines += [
            f"      {line}"
            for line in (info.description, _arguments(info.parameters), _problem(info.problem))
            if line
        ]
    return "\n".join(lines)


def _describe(registry: Registry[Any], name: str) -> PluginInfo:
    try:
        cls = registry.get(name)
    except PluginError as error:
        return PluginInfo(registry.kind, name, registry.source(name), "", problem=str(error))
    text = getattr(cls, "description", None) or (inspect.getdoc(cls) or "").partition("\n\n")[0]
    parameters = dict(cls.parameters) if registry.kind == "tool" else None
    return PluginInfo(registry.kind, name, registry.source(name), " ".join(text.split()), parameters)


def _arguments(parameters: JsonObject | None) -> str:
    """Return a tool's arguments as `name: type`; optional ones are marked with a question mark."""
    if not parameters:
        return ""
    required = parameters.get("required", ())
    properties: Mapping[str, Any] = parameters.get("properties", {})
    return ", ".join(
        f"{name}{'' if name in required else '?'}: {_type(schema)}" for name, schema in properties.items()
    )


def _type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(map(repr, schema["enum"]))
    options = schema.get("anyOf")
    return " | ".join(map(_type, options)) if options else str(schema.get("type", "any"))


def _problem(problem: str | None) -> str:
    return f"DOES NOT LOAD: {problem}" if problem else ""
