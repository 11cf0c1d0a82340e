"""What becomes of attempts by `rollout.on_outcome`: played again, learned from, masked, left out, or the end of their group. No clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentrl.config.rollout import RolloutConfig
from agentrl.types import SCORED_OUTCOMES, Lease, Outcome, Trajectory

MAX_REPLACEMENT_PAUSE_S = 60.0
"""What is down for minutes is asked once a minute; a longer pause would only leave it idle when it is back."""

Fate = Literal["train", "mask", "leave_out", "drop"]
"""What becomes of the last attempt of a member: the group has it, to learn from or masked, is complete without it, or ends with it."""


@dataclass(frozen=True, slots=True)
class Retry:
    """A member is tried once more after `pause_s` seconds."""

    how: Literal["retried", "replaced"]
    pause_s: float


class RetryBudget:
    """The tries that one member has left, or one scoring of a whole group; retries and replacements are counted apart."""

    def __init__(self, rollout: RolloutConfig) -> None:
        self._rollout = rollout
        self._retries_left = rollout.max_retries
        self._replacements_left = rollout.max_replacements
        self._pause_s = rollout.replacement_pause_s

    def after(self, outcome: Outcome) -> Retry | None:
        """Use up one try after an attempt that ended so; None: that attempt was the last."""
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
    """Decides of the members of one group as they end. A group that too few members with a reward are left of is dropped."""

    def __init__(self, lease: Lease, rollout: RolloutConfig) -> None:
        self._rollout = rollout
        self._rewarded = lease.group_size  # members that have a reward or may still get one, the greedy one not counted
        self.reason: str | None = None

    @property
    def is_dropped(self) -> bool:
        return self.reason is not None

    def settle(self, last: Trajectory) -> Fate:
        """Return what becomes of a member whose last attempt this is; the first "drop" says by `reason` why the group ends."""
        fate = self._of(last)
        if fate == "drop":
            self.end(last)
        return fate

    def end(self, last: Trajectory) -> None:
        """Drop the group because of an attempt, unless it is dropped already."""
        self.reason = self.reason or last.outcome.value

    def _of(self, last: Trajectory) -> Fate:
        policy = self._rollout.final_policy(last.outcome)
        if last.outcome in SCORED_OUTCOMES and policy in ("train", "mask"):
            return policy
        if policy == "drop" or last.is_greedy:  # nothing stands in for the baseline of all others
            return "drop"
        self._rewarded -= 1
        if self._rewarded < self._rollout.min_group_size:
            return "drop"
        return "leave_out" if policy == "shrink" else "mask"
