"""Tracing as the rollout sees it. Who makes traces registers a function as `otlp` of `agentrl.tracing`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

from agentrl.config.tracking import SpansConfig
from agentrl.registered import required
from agentrl.rollout.group_player import PlayLog, Tracing
from agentrl.servers.server import Client
from agentrl.tracking.spans import Span
from agentrl.types import ServerPause


class AttemptTracing(Protocol):
    """Makes traces of attempts. kind: training, validation or evaluation."""

    def of(self, kind: str) -> Tracing:
        """Return what traces a group."""

    def log(self, inner: PlayLog, kind: str) -> PlayLog:
        """Return a log that ends traces, and passes on to `inner`."""


class ProcessTracing(Protocol):
    """The tracing of a process in which attempts are played."""

    @property
    def attempts(self) -> AttemptTracing: ...

    def connecting(self, connect: Callable[[str], Client]) -> Callable[[str], Client]:
        """Return a function that connects to servers with clients that record their requests."""

    def paused(self, pauses: Iterable[ServerPause]) -> None:
        """Add pauses of servers to the traces of the attempts that they held up. Call it within trio."""

    def offer(self, spans: Sequence[Span]) -> None:
        """Send finished spans of others, too. Never blocks; thread-safe."""

    def counters(self) -> dict[str, float]:
        """Return `spans_sent`, `spans_lost` and `spans_left_out` so far. Thread-safe."""

    def problem(self) -> str:
        """Return why the collector did not take spans most recently; "" if it took all."""

    def close(self) -> None:
        """Send what waits, within seconds."""


def open_tracing(config: SpansConfig, *, run: str) -> ProcessTracing | None:
    """Return None if `config` names no collector.

    Raises:
        ConfigError: nothing that makes traces is installed.
    """
    if config.endpoint is None:
        return None
    return cast(ProcessTracing, _otlp(config)(config, run=run))


def check_tracing(config: SpansConfig) -> None:
    """Raise ConfigError if `config` names a collector, and what makes traces is not installed."""
    if config.endpoint is not None:
        _otlp(config).check()


def _otlp(config: SpansConfig) -> Any:
    return required("agentrl.tracing", "otlp", by=f"tracking.spans.endpoint={config.endpoint}")
