"""`FailedShare`: ends a run if too many attempts fail, of all or of those that use one plugin.

It would learn nothing, or only from attempts without the fault.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from agentrl.config.rollout import RolloutConfig
from agentrl.config.schema import Config
from agentrl.controller.listeners import RunListener
from agentrl.controller.run_dir import RunDir
from agentrl.errors import InfrastructureError
from agentrl.tracking.attempts import AttemptCounts
from agentrl.types import Outcome, PluginId

if TYPE_CHECKING:
    from agentrl.controller.run import Run

MIN_ATTEMPTS = 64
MIN_UNPROVEN = 16
"""Attempts after which a plugin that has failed in all of them is no outage but a mistake."""
STALL_SHARE = 0.1
"""The fault must last for this share of buffer.stall_timeout_s: a short outage of a service ends no run."""


class Causes(Protocol):
    """Knows why attempts failed: `agentrl.tracking.failures.FailureTally`."""

    def most_common(self, *, ignored: frozenset[Outcome]) -> str: ...

    def first(self, plugin: PluginId) -> str: ...


@dataclass(frozen=True, slots=True)
class _Sample:
    time: float
    num_ended: int
    num_failed: int


class _Latest:
    """The latest attempts: the fewest that are enough, in number and in seconds."""

    def __init__(self, now: float, *, lasting_s: float) -> None:
        self._lasting_s = lasting_s
        self._samples = deque([_Sample(now, 0, 0)])

    def add(self, now: _Sample) -> tuple[int, int] | None:
        """Return how many of how many failed; None if they are not enough."""
        self._samples.append(now)
        while len(self._samples) > 1 and self._is_enough(self._samples[1], now):
            self._samples.popleft()
        first = self._samples[0]
        if not self._is_enough(first, now):
            return None
        return now.num_failed - first.num_failed, now.num_ended - first.num_ended

    def _is_enough(self, first: _Sample, now: _Sample) -> bool:
        return now.num_ended - first.num_ended >= MIN_ATTEMPTS and now.time - first.time >= self._lasting_s


class FailedShare:
    """Judges the latest training attempts: at least MIN_ATTEMPTS, over STALL_SHARE of the stall timeout.

    Two kinds of failures are not counted: attempts that no server answered, because servers have their own
    limits; and outcomes that `rollout.on_outcome` replaces, because the config expects them.

    The attempts that used a plugin are judged in the same way. A plugin that failed in each of the first
    MIN_UNPROVEN attempts ends the run at once.
    """

    def __init__(
        self, rollout: RolloutConfig, *, stall_timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_share = rollout.max_failed_share
        self.ignored = frozenset(
            {Outcome.MODEL_ERROR} | {o for o, policy in rollout.on_outcome.items() if policy == "replace"}
        )
        self._clock = clock
        self._open = partial(_Latest, lasting_s=STALL_SHARE * stall_timeout_s)
        self._all = self._open(clock())
        self._by_plugin: dict[PluginId, _Latest] = {}

    def check(self, counts: AttemptCounts, causes: Causes) -> None:
        """Judge the latest attempts. `counts`: since the start of the run.

        Raises:
            InfrastructureError: too many of the latest attempts failed, or of those that used a plugin.
        """
        now = self._clock()
        num_failed = counts.num_failed(ignored=self.ignored)
        latest = self._all.add(_Sample(now, counts.num_ended, num_failed))
        if self._max_share is None:
            return
        for plugin, num_used in counts.used.items():
            self._check_plugin(plugin, _Sample(now, num_used, counts.ended_by[plugin]), causes)
        if latest is not None and self._are_too_many(*latest):
            reason = causes.most_common(ignored=self.ignored)
            raise InfrastructureError(
                f"{latest[0]} of the latest {latest[1]} attempts failed "
                f"(rollout.max_failed_share={self._max_share:g}), most of them with: {reason}"
            )

    def _check_plugin(self, plugin: PluginId, now: _Sample, causes: Causes) -> None:
        if plugin not in self._by_plugin:
            self._by_plugin[plugin] = self._open(now.time)
        latest = self._by_plugin[plugin].add(now)
        if now.num_failed == now.num_ended >= MIN_UNPROVEN:
            latest = now.num_failed, now.num_ended
        if latest is not None and self._are_too_many(*latest):
            raise InfrastructureError(
                f"{plugin} failed in {latest[0]} of the latest {latest[1]} attempts that used it, and ended "
                f"them (rollout.max_failed_share={self._max_share:g}); the first: {causes.first(plugin)}"
            )

    def _are_too_many(self, num_failed: int, num_ended: int) -> bool:
        return self._max_share is not None and num_failed >= self._max_share * num_ended


class FailedShareListener(RunListener):
    """Judges the training attempts of a run."""

    def __init__(self, config: Config, run_dir: RunDir) -> None:
        self._config = config

    def on_start(self, run: Run) -> None:
        config = self._config
        self._share = FailedShare(config.rollout, stall_timeout_s=config.buffer.stall_timeout_s)

    def on_attempts(self, run: Run, counts: AttemptCounts) -> None:
        self._share.check(counts, run.observer.failures.tally)
