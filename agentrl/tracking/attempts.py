"""Accounting of all training attempts, failed and dropped ones too: counts, and a record per failure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agentrl.tracking.metrics import StepRecord
from agentrl.types import SCORED_OUTCOMES, Failure, FinishedAttempt, Outcome, PluginId, Trajectory

Became = Literal["retried", "replaced", "masked", "left_out", "dropped", "not_scored", "went_on"]
"""The consequence of a failure. retried, replaced: another attempt was made. masked: the member stays in its
group without a reward. left_out: the group has one member less. dropped: the whole group was dropped.
not_scored: it was an attempt of a validation. went_on: only a tool call failed; it was repeated, or the model
saw the error. Or only the `close` of a plugin failed."""


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """An attempt that failed.

    version: of the policy when its group was leased, or under validation. time: seconds since the epoch.
    """

    failure: Failure
    outcome: Outcome
    became: Became
    task_id: str
    data_source: str
    agent_name: str
    group_id: int
    member: int
    version: int
    time: float

    @classmethod
    def of(cls, attempt: FinishedAttempt, *, became: Became, version: int) -> FailedAttempt:
        """Return the record of an attempt that failed just now."""
        t = attempt
        failure = t.failure or Failure(t.outcome.value)
        return cls(
            failure,
            t.outcome,
            became,
            t.task_id,
            t.data_source,
            t.agent_name,
            t.group_id,
            t.member,
            version,
            time.time(),
        )

    @classmethod
    def survived(cls, attempt: Trajectory, failure: Failure, *, version: int) -> FailedAttempt:
        """Return the record of a failure that did not end the attempt."""
        is_of_environment = failure.plugin is not None and failure.plugin.kind == "environment"
        outcome = Outcome.ENVIRONMENT_ERROR if is_of_environment else Outcome.TOOL_ERROR
        return cls.of(attempt.replace(failure=failure, outcome=outcome), became="went_on", version=version)


@dataclass(frozen=True, slots=True)
class AttemptCounts:
    """Counts of ended attempts: by outcome, by plugins used, and by plugins that failed.

    ended_by: by the plugin that ended them, without those that another attempt replaced.
    """

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    used: Counter[PluginId] = field(default_factory=Counter)
    failed: Counter[PluginId] = field(default_factory=Counter)
    ended_by: Counter[PluginId] = field(default_factory=Counter)

    @property
    def num_ended(self) -> int:
        return sum(self.outcomes.values())

    def num_failed(self, *, ignored: frozenset[Outcome] = frozenset()) -> int:
        """Return the number of attempts without a score, except those with an `ignored` outcome."""
        return sum(
            count for outcome, count in self.outcomes.items() if outcome not in SCORED_OUTCOMES | ignored
        )

    def __add__(self, other: AttemptCounts) -> AttemptCounts:
        return AttemptCounts(
            self.outcomes + other.outcomes,
            self.used + other.used,
            self.failed + other.failed,
            self.ended_by + other.ended_by,
        )

    def __sub__(self, earlier: AttemptCounts) -> AttemptCounts:
        """Return the counts since `earlier`."""
        return AttemptCounts(
            self.outcomes - earlier.outcomes,
            self.used - earlier.used,
            self.failed - earlier.failed,
            self.ended_by - earlier.ended_by,
        )

    def words(self) -> str:
        """Return e.g. `120 ended, 96 completed, 4 truncated, 20 failed (16.7 %: reward_error 20)`."""
        scored = [
            f"{count} {outcome.value}"
            for outcome, count in self.outcomes.most_common()
            if outcome in SCORED_OUTCOMES
        ]
        failed = [
            f"{outcome.value} {count}"
            for outcome, count in self.outcomes.most_common()
            if outcome not in SCORED_OUTCOMES
        ]
        share = f"{100 * self.num_failed() / max(self.num_ended, 1):.1f} %"
        failures = [f"{self.num_failed()} failed ({share}: {', '.join(failed)})"] if failed else []
        return ", ".join([f"{self.num_ended} ended", *scored, *failures])

    def metrics(self) -> dict[str, float]:
        """Return `attempts/` + `ended`, `failed`, each outcome (counts), `failed_share`,
        `failed_share/<kind>/<name>`.

        A plugin's share is over the attempts that used it. An attempt can continue after a tool failed.
        """
        values = {"ended": float(self.num_ended), "failed": float(self.num_failed())}
        values |= {outcome.value: float(count) for outcome, count in self.outcomes.items()}
        if self.num_ended:
            values["failed_share"] = self.num_failed() / self.num_ended
        values |= {
            f"failed_share/{p.kind}/{p.name}": self.failed[p] / count
            for p, count in sorted(self.used.items())
        }
        return {f"attempts/{name}": value for name, value in values.items()}


def ended_in(records: Sequence[StepRecord]) -> AttemptCounts:
    """Return the outcomes of all attempts, summed over the records of steps."""
    counts = {o: sum(record.values.get(f"attempts/{o.value}", 0.0) for record in records) for o in Outcome}
    return AttemptCounts(Counter({outcome: int(count) for outcome, count in counts.items() if count}))


def troubles_text(values: Mapping[str, float]) -> str:
    """Return failed and retried attempts and dropped groups of a step as text; "" if there are none."""
    counts = {
        "failed": values.get("attempts/failed", 0.0),
        "retried": values.get("rollout/retried", 0.0) + values.get("rollout/replaced", 0.0),
        "groups dropped": values.get("rollout/dropped_groups", 0.0),
    }
    return "  ".join(f"{count:.0f} {what}" for what, count in counts.items() if count > 0)
