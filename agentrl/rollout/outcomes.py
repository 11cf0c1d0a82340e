"""What happens to attempts according to `rollout.on_outcome`: retried, trained on, masked, left out, or group
dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentrl.config.rollout import RolloutConfig
from agentrl.types import SCORED_OUTCOMES, Lease, Outcome, Trajectory

MAX_REPLACEMENT_PAUSE_S = 60.0
"""Longest pause.

A service that is down for minutes is retried once a minute, so its recovery is noticed soon.
"""

Fate = Literal["train", "mask", "leave_out", "drop"]
"""What happens to a member after its last attempt: trained on, masked, left out of its group, or its group is
dropped.
"""


@dataclass(frozen=True, slots=True)
class Retry:
    """Retry the member after `pause_s` seconds."""

    how: Literal["retried", "replaced"]
    pause_s: float


class RetryBudget:
    """The remaining retries and replacements of one member, or of the scoring of one group.

    They are counted separately.
    """

    def __init__(self, rollout: RolloutConfig) -> None:
        self._rollout = rollout
        self._retries_left = rollout.max_retries
        self._replacements_left = rollout.max_replacements
        self._pause_s = rollout.replacement_pause_s

    def after(self, outcome: Outcome) -> Retry | None:
        """Return the retry that follows an attempt with this outcome, and spend it; None if that attempt was
        the last.
        """
        policy = self._rollout.on_outcome[outcome]
        if policy == "retry" and self._retries_left:
            self._retries_left -= 1
            return Retry("retried", 0.0)
        if policy == "replace" and self._replacements_left:
            self._replacements_left -= 1
            pause_s = min(self._pause_s, MAX_REPLACEMENT_PAUSE_S)
            self._pause_s *= 2
            return Retry("replaced", pause_s)
        return None


class OutcomePolicy:
    """Decides what happens to the members of one group as they end.

    If too few can have a reward, the group is dropped.
    """

    def __init__(self, lease: Lease, rollout: RolloutConfig) -> None:
        self._rollout = rollout
        self._rewarded = lease.group_size  # members that have or may get a reward, without the greedy one
        self.reason: str | None = None

    @property
    def is_dropped(self) -> bool:
        return self.reason is not None

    def settle(self, last: Trajectory) -> Fate:
        """Return what happens to a member after its last attempt. The first "drop" sets `reason`."""
        fate = self._of(last)
        if fate == "drop":
            self.end(last)
        return fate

    def end(self, last: Trajectory) -> None:
        """Drop the group because of this attempt, unless it is already dropped."""
        self.reason = self.reason or last.outcome.value

    def _of(self, last: Trajectory) -> Fate:
        policy = self._rollout.final_policy(last.outcome)
        if last.outcome in SCORED_OUTCOMES and policy in ("train", "mask"):
            return policy
        if policy == "drop" or last.is_greedy:  # the greedy baseline has no substitute
            return "drop"
        self._rewarded -= 1
        if self._rewarded < self._rollout.min_group_size:
            return "drop"
        return "leave_out" if policy == "shrink" else "mask"
