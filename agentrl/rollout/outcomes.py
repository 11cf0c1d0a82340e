"""What happens to attempts, by their outcome: retried, trained on, masked, left out, or kept as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from agentrl.config.rollout import FinalPolicy, RolloutConfig
from agentrl.types import SCORED_OUTCOMES, Lease, Outcome, Trajectory

MAX_RETRY_PAUSE_S = 60.0
"""Longest pause.

A service that is down for minutes is retried once a minute, so its recovery is noticed soon.
"""
KEPT_RETRY_PAUSE_S = 1.0
"""Pause before the first retry of an attempt whose failure is kept; doubled for each further one."""

RetryKind = Literal["retried", "replaced"]
Settlement = Literal["train", "mask", "leave_out", "drop", "keep"]
"""What happens to a member after its last attempt: trained on, masked, left out of its group, its group is
dropped, or kept as it is, even if it failed.
"""


@dataclass(frozen=True, slots=True)
class Retry:
    """Retry the member after `pause_s` seconds."""

    how: RetryKind
    pause_s: float


@dataclass(frozen=True, slots=True)
class RetryLimit:
    """At most `num` retries.

    The pause before the first is `pause_s` seconds; it doubles for each further one.
    """

    num: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class OutcomeTable:
    """What happens to attempts of each outcome. Use `of_training` or `keeping`.

    retries: outcomes after which another attempt is made.
    final: what happens to a member after its last attempt.
    min_group_size: a group is dropped if fewer of its members can have a reward.
    retries_scoring: whether the scoring of a whole group is retried like an attempt.
    """

    retries: Mapping[Outcome, RetryKind]
    limits: Mapping[RetryKind, RetryLimit]
    final: Mapping[Outcome, FinalPolicy | Literal["keep"]]
    min_group_size: int = 0
    retries_scoring: bool = False

    @classmethod
    def of_training(cls, rollout: RolloutConfig) -> OutcomeTable:
        """Return the table of `rollout.on_outcome`."""
        kinds: Mapping[str, RetryKind] = {"retry": "retried", "replace": "replaced"}
        return cls(
            retries={
                outcome: kinds[policy] for outcome, policy in rollout.on_outcome.items() if policy in kinds
            },
            limits={
                "retried": RetryLimit(rollout.max_retries, 0.0),
                "replaced": RetryLimit(rollout.max_replacements, rollout.replacement_pause_s),
            },
            final={outcome: rollout.final_policy(outcome) for outcome in Outcome},
            min_group_size=rollout.min_group_size,
            retries_scoring=True,
        )

    @classmethod
    def keeping(cls, *, max_retries: int = 0) -> OutcomeTable:
        """Return a table in which each failure is retried `max_retries` times and then kept as a result."""
        return cls(
            retries={outcome: "retried" for outcome in Outcome if outcome not in SCORED_OUTCOMES},
            limits={"retried": RetryLimit(max_retries, KEPT_RETRY_PAUSE_S)},
            final=dict.fromkeys(Outcome, "keep"),
        )


class RetryBudget:
    """The remaining retries and replacements of one member, or of the scoring of one group.

    They are counted separately.
    """

    def __init__(self, table: OutcomeTable) -> None:
        self._table = table
        self._pauses_s = {kind: _pauses(limit) for kind, limit in table.limits.items()}

    def after(self, outcome: Outcome) -> Retry | None:
        """Return the retry that follows an attempt with this outcome, and spend it; None if that attempt was
        the last.
        """
        kind = self._table.retries.get(outcome)
        if kind is None:
            return None
        pause_s = next(self._pauses_s[kind], None)
        return None if pause_s is None else Retry(kind, pause_s)


def _pauses(limit: RetryLimit) -> Iterator[float]:
    pause_s = limit.pause_s
    for _ in range(limit.num):
        yield min(pause_s, MAX_RETRY_PAUSE_S)
        pause_s *= 2


class GroupPolicy:
    """Decides what happens to the members of one group as they end.

    dropped_by: the outcome that dropped the group; None: it is not dropped.
    """

    def __init__(self, lease: Lease, table: OutcomeTable) -> None:
        self._table = table
        self._rewarded = lease.group_size  # members that have or may get a reward, without the greedy one
        self.dropped_by: Outcome | None = None

    def settle(self, last: Trajectory) -> Settlement:
        """Return what happens to a member after its last attempt. The first "drop" sets `dropped_by`."""
        settlement = self._settlement_of(last)
        if settlement == "drop":
            self.dropped_by = self.dropped_by or last.outcome
        return settlement

    def settle_unscored(self) -> Settlement:
        """Return what happens to members whose scoring as a group failed for good."""
        if self._table.final[Outcome.REWARD_ERROR] == "keep":
            return "keep"
        self.dropped_by = (
            self.dropped_by or Outcome.REWARD_ERROR
        )  # group rewards fail for all members at once
        return "drop"

    def _settlement_of(self, last: Trajectory) -> Settlement:
        policy = self._table.final[last.outcome]
        if policy == "keep":
            return "keep"
        if last.outcome in SCORED_OUTCOMES and policy in ("train", "mask"):
            return policy
        if policy == "drop" or last.is_greedy:  # the greedy baseline has no substitute
            return "drop"
        self._rewarded -= 1
        if self._rewarded < self._table.min_group_size:
            return "drop"
        return "leave_out" if policy == "shrink" else "mask"
