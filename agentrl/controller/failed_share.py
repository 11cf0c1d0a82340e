"""`FailedShare`: ends a run if too many attempts fail.

It would learn nothing, or only from tasks without the fault.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from agentrl.config.rollout import RolloutConfig
from agentrl.errors import InfrastructureError
from agentrl.tracking.attempts import AttemptCounts
from agentrl.types import Outcome

MIN_ATTEMPTS = 64
STALL_SHARE = 0.1
"""The fault must last for this share of buffer.stall_timeout_s: a short outage of a service ends no run."""


@dataclass(frozen=True, slots=True)
class _Sample:
    time: float
    num_ended: int
    num_failed: int


class FailedShare:
    """Judges the latest training attempts: at least MIN_ATTEMPTS, over STALL_SHARE of the stall timeout.

    Two kinds of failures are not counted: attempts that no server answered, because servers have their own
    limits; and outcomes that `rollout.on_outcome` replaces, because the config expects them.
    """

    def __init__(
        self, rollout: RolloutConfig, *, stall_timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_share = rollout.max_failed_share
        self._lasting_s = STALL_SHARE * stall_timeout_s
        self.ignored = frozenset(
            {Outcome.MODEL_ERROR} | {o for o, policy in rollout.on_outcome.items() if policy == "replace"}
        )
        self._clock = clock
        self._samples = deque([_Sample(clock(), 0, 0)])

    def check(self, counts: AttemptCounts, *, most_common: Callable[[], str]) -> None:
        """Judge the latest attempts.

        `counts`: since the start of the run. `most_common`: the main reason, as text.

        Raises:
            InfrastructureError: too many of the latest attempts failed.
        """
        now = _Sample(self._clock(), counts.num_ended, counts.num_failed(ignored=self.ignored))
        self._samples.append(now)
        # Keep the shortest window that is still long enough, in attempts and in seconds.
        while len(self._samples) > 1 and self._is_enough(self._samples[1], now):
            self._samples.popleft()
        first = self._samples[0]
        if self._max_share is None or not self._is_enough(first, now):
            return
        num_ended, num_failed = now.num_ended - first.num_ended, now.num_failed - first.num_failed
        if num_failed >= self._max_share * num_ended:
            raise InfrastructureError(
                f"{num_failed} of the latest {num_ended} attempts failed "
                f"(rollout.max_failed_share={self._max_share:g}), most of them with: {most_common()}"
            )

    def _is_enough(self, first: _Sample, now: _Sample) -> bool:
        return now.num_ended - first.num_ended >= MIN_ATTEMPTS and now.time - first.time >= self._lasting_s
