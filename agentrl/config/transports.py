"""`TransportKind`: a way of new weights to the servers, and all that a config knows of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import PluginError
from agentrl.registered import named

GROUP = "agentrl.transports"
"""Entry points: name -> `TransportKind`."""


@dataclass(frozen=True, slots=True)
class TransportKind:
    """A way of new weights to the servers.

    name: the value of `rollout.weights.transport`.
    opens: `f(learner: LearnerCalls, config: WeightsConfig, *, folder: Path) -> Transport`, or its place as
    `module:function`, so that reading a config imports no torch.
    sends_changes: it can send only what an update changed (`delta`).
    sends_adapters: it can send an adapter alone.
    has_sources: several ranks can send (`sources`).
    is_on_disk: servers read files.
    refused_by: kinds of servers (`rollout.backend`) that do not take it, with the reason.
    """

    name: str
    opens: str | Callable[..., Any]
    sends_changes: bool = False
    sends_adapters: bool = False
    has_sources: bool = False
    is_on_disk: bool = False
    refused_by: Mapping[str, str] = field(default_factory=dict)


def transport_named(name: str) -> TransportKind:
    """Return the kind that a package registers.

    Raises:
        PluginError, ConfigError: see `agentrl.registered.named`.
    """
    found = named("transport", name, group=GROUP)
    if not isinstance(found, TransportKind):
        raise PluginError(f"transport {name!r} is {type(found).__name__}, not a TransportKind")
    return found
