"""Lookup of functions by name: built in, from an installed package, or from the user's own file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from agentrl.errors import AgentRLError, PluginError
from agentrl.plugins.sources import Reference
from agentrl.registered import registered

F = TypeVar("F", bound=Callable[..., Any])


def find_function(kind: str, name: str, built_in: Mapping[str, F], *, group: str) -> F:
    """Return the function registered or referenced as `name`.

    Args:
        kind: what kind of function it is, for messages: `advantage estimator`.
        name: a key of `built_in`, else an entry point of `group`, else `path/to/file.py:function` or
            `package.module:function`.

    Raises:
        PluginError: the name is unknown (the message lists the known ones), its import fails, or it is not a
            function.
    """
    if name in built_in:
        return built_in[name]
    reference = Reference.parse(name)
    found = reference.load() if reference is not None else _load_entry_point(kind, name, built_in, group)
    if not callable(found):
        raise PluginError(f"{kind} {name!r} is {type(found).__name__}, not a function")
    return cast(F, found)


def _load_entry_point(kind: str, name: str, built_in: Mapping[str, Any], group: str) -> Any:
    installed = registered(group)
    if name not in installed:
        known = ", ".join([*built_in, *sorted(installed)])
        raise PluginError(
            f"unknown {kind} {name!r}; known: {known}; your own: path/to/file.py:function, or an entry point "
            f"of {group}"
        )
    entry = installed[name]
    try:
        return entry.load()
    except AgentRLError:
        raise
    except Exception as error:  # importing runs third-party code
        raise PluginError(f"{kind} {name!r} ({entry.entry.value}) cannot be imported: {error}") from error
