"""Alarms: bounds on the metrics of steps. An alarm warns and stores evidence; it never ends a run.

A rule raises an alarm once when its metric crosses the bound. It is silent while the metric stays beyond the
bound, and is armed again when the metric has returned by a margin. The state depends only on the records, so
a resumed run neither forgets nor repeats an alarm.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from agentrl.config.tracking import AlarmsConfig
from agentrl.figures.trajectory_metrics import is_constant
from agentrl.tracking.alarms import Alarm
from agentrl.tracking.metrics import StepRecord
from agentrl.tracking.unwritten import AppendedFile
from agentrl.types import NO_VERSION, Group

_MARGIN = 0.1
"""Hysteresis: an alarm is cleared only after the metric has returned by a tenth of the bound."""


Concern = Callable[[Group], float]
"""Scores how much a group illustrates an alarm; the highest are stored as evidence."""


@dataclass(frozen=True, slots=True)
class AlarmRule:
    """The sum of `metrics` must be `at_most` or `at_least` the `bound`.

    metrics: a name that ends in `/` is a prefix; each metric below it is judged separately.
    is_relative: the mean of the latest steps is compared with `bound` times the mean of the first steps; one
        batch of easy tasks is no drift.
    concerns: ranks the groups to store as evidence; None: no group shows the problem.
    """

    name: str
    metrics: tuple[str, ...]
    side: Literal["at_most", "at_least"]
    bound: float
    advice: str
    concerns: Concern | None
    is_relative: bool = False

    def instances(self, names: Iterable[str]) -> list[AlarmRule]:
        """Return a copy of the rule for each metric of `names` below its prefix, or itself without a
        prefix."""
        (first, *_) = self.metrics
        if not first.endswith("/"):
            return [self]
        return [replace(self, metrics=(name,)) for name in names if name.startswith(first)]

    def value(self, values: Mapping[str, float]) -> float | None:
        """Return the watched value of a step; None if the step did not measure it."""
        found = [values[name] for name in self.metrics if name in values and not math.isnan(values[name])]
        return sum(found) if len(found) == len(self.metrics) else None


class Alarms:
    """Judges each step by all rules, and records raised and cleared alarms in a JSON-lines file."""

    def __init__(
        self, rules: Sequence[AlarmRule], *, window_steps: int, file: Path, kept: Iterable[StepRecord] = ()
    ) -> None:
        """Replay the records `kept` from before a resume, and rewrite the file with their alarms only."""
        self._rules = rules
        self._window_steps = window_steps
        self._watches: dict[AlarmRule, _Watch] = {}
        self._file = AppendedFile(file)
        judged = [
            one
            for record in kept
            if record.kind == "train"
            for one in self._judge(record.step, record.values)
        ]
        file.unlink(missing_ok=True)
        self._append([alarm for _, alarm in judged])

    def observe(self, step: int, values: Mapping[str, float]) -> list[tuple[AlarmRule, Alarm]]:
        """Judge a step, record raised and cleared alarms, and return the raised ones with their rules."""
        judged = self._judge(step, values)
        with suppress(OSError):  # `write` retries and reports it
            self._append([alarm for _, alarm in judged])
        return [(rule, alarm) for rule, alarm in judged if alarm.event == "raised"]

    @property
    def num_raised(self) -> int:
        """Number of alarms that were raised and not cleared yet."""
        return sum(watch.is_raised for watch in self._watches.values())

    def _judge(self, step: int, values: Mapping[str, float]) -> list[tuple[AlarmRule, Alarm]]:
        judged = []
        for rule in [instance for each in self._rules for instance in each.instances(values)]:
            if rule not in self._watches:
                self._watches[rule] = _Watch(rule, self._window_steps)
            if (alarm := self._watches[rule].judge(step, values)) is not None:
                judged.append((rule, alarm))
        return judged

    def write(self) -> None:
        """Retry writes that failed in `observe`. Raises OSError if the disk still refuses them."""
        if self._file.has_pending:
            self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _append(self, alarms: Sequence[Alarm]) -> None:
        if alarms:
            self._file.append_records(*(json.dumps(finite(asdict(alarm))).encode() for alarm in alarms))


class _Watch:
    """The state of one rule over time."""

    def __init__(self, rule: AlarmRule, window_steps: int) -> None:
        self.rule = rule
        self._window_steps = window_steps if rule.is_relative else 1
        self._first: list[float] = []
        self._latest: deque[float] = deque(maxlen=self._window_steps)
        self.is_raised = False

    def judge(self, step: int, values: Mapping[str, float]) -> Alarm | None:
        measured = self.rule.value(values)
        if measured is None or (bound := self._bound(measured)) is None:
            return None
        value = sum(self._latest) / len(self._latest)
        if self.is_raised:
            if not self._is_beyond(
                value, bound * (1 - _MARGIN if self.rule.side == "at_most" else 1 + _MARGIN)
            ):
                self.is_raised = False
                return self._alarm(step, "cleared", value, bound)
        elif self._is_beyond(value, bound):
            self.is_raised = True
            return self._alarm(step, "raised", value, bound)
        return None

    def _bound(self, measured: float) -> float | None:
        """Add a value and return the absolute bound; None while a window is not full yet."""
        if self.rule.is_relative and len(self._first) < self._window_steps:
            self._first.append(measured)
            return None
        self._latest.append(measured)
        if len(self._latest) < self._window_steps:
            return None
        return self.rule.bound * (sum(self._first) / len(self._first) if self.rule.is_relative else 1.0)

    def _is_beyond(self, value: float, bound: float) -> bool:
        return value > bound if self.rule.side == "at_most" else value < bound

    def _alarm(self, step: int, event: Literal["raised", "cleared"], value: float, bound: float) -> Alarm:
        rule = self.rule
        metric = " + ".join(rule.metrics) + (
            f" (mean of {self._window_steps} steps)" if self._window_steps > 1 else ""
        )
        return Alarm(step, event, rule.name, metric, value, rule.side, bound, rule.advice)


def finite(fields: Mapping[str, object]) -> dict[str, object]:
    """Replace non-finite numbers by None, because JSON has none."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
    }


# --------------------------------------------------------------------------------------------------- evidence


def staleness(group: Group) -> float:
    """Return a sort key for the age of the group's oldest token: minus its version."""
    return -float(group.min_version) if group.min_version != NO_VERSION else -math.inf


def longest_response(group: Group) -> float:
    """Return the tokens of the group's longest response."""
    return float(max(t.num_response_tokens for t in group.trajectories))


def shortest_response(group: Group) -> float:
    """Return minus the tokens of the group's shortest response."""
    return -float(min(t.num_response_tokens for t in group.trajectories))


def evidence(groups: Sequence[Group], rule: AlarmRule, *, limit: int) -> list[Group]:
    """Return the `limit` groups that the rule concerns most, in the order of the batch."""
    concerns = rule.concerns
    if concerns is None:
        return []
    # stable: ties go to the first
    ranked = sorted(range(len(groups)), key=lambda index: -concerns(groups[index]))
    return [groups[index] for index in sorted(ranked[:limit])]


# ------------------------------------------------------------------------------------------------------ rules


def rules_from(options: AlarmsConfig) -> list[AlarmRule]:
    """Return the rules whose bound is set."""
    length = "rollout/response_tokens/mean"
    change = options.max_length_change
    rules = [
        _at_least(
            "entropy_collapse",
            options.min_entropy_share,
            longest_response,
            "learner/entropy",
            is_relative=True,
        ),
        _at_least("ess_low", options.min_ess, staleness, "learner/correction/ess"),
        _at_most("ratio_tail", options.max_ratio, staleness, "learner/ratio_max"),
        _at_most("length_growth", change, longest_response, length, is_relative=True),
        _at_least("length_collapse", change and 1 / change, shortest_response, length, is_relative=True),
        _at_most("logprob_gap", options.max_logprob_gap, staleness, "learner/mismatch_mean"),
        _at_most("policy_moved", options.max_moved, staleness, "learner/moved_per_version"),
        _at_most("clip_share", options.max_clip_share, staleness, "learner/clip_low", "learner/clip_high"),
        _at_most("constant_groups", options.max_constant_groups, is_constant, "rollout/constant_groups"),
        _at_most("failed_share", options.max_failed_share, None, "attempts/failed_share"),
        _at_most("failed_share", options.max_failed_share, None, "attempts/failed_share/"),
    ]
    return [rule for rule in rules if rule is not None]


def _at_most(
    name: str, bound: float | None, concerns: Concern | None, *metrics: str, is_relative: bool = False
) -> AlarmRule | None:
    return (
        None
        if bound is None
        else AlarmRule(name, metrics, "at_most", bound, _ADVICE[name], concerns, is_relative)
    )


def _at_least(
    name: str, bound: float | None, concerns: Concern, *metrics: str, is_relative: bool = False
) -> AlarmRule | None:
    return (
        None
        if bound is None
        else AlarmRule(name, metrics, "at_least", bound, _ADVICE[name], concerns, is_relative)
    )


_ADVICE: Mapping[str, str] = {
    "entropy_collapse": "the policy no longer explores: raise algorithm.clip_high or entropy_coefficient, or "
    "lower learner.optimizer.lr",
    "ess_low": "few tokens dominate the update: lower buffer.max_staleness or learner.optimizer.lr, or "
    "reject tokens that are far off-policy",
    "ratio_tail": "the policy moved far within one step: lower learner.optimizer.lr or "
    "learner.epochs_per_step",
    "length_growth": "answers became longer: look for repetition in the saved groups, or add the reward term "
    "length_penalty",
    "length_collapse": "answers became shorter: look in the saved groups for a reward that short answers "
    "exploit",
    "logprob_gap": "tokens are old, or server and learner disagree: check buffer.max_staleness, model.dtype "
    "and rollout.weights.verify=true",
    "policy_moved": "each update moves the policy far, so tokens are soon too old: lower "
    "learner.optimizer.lr, to which the movement is proportional",
    "clip_share": "too much of the update is clipped: lower learner.optimizer.lr, learner.epochs_per_step or "
    "buffer.max_staleness",
    "failed_share": "failures bias the training data: see failures.parquet for messages and code lines",
    "constant_groups": "equal rewards give no training signal: mix in easier or harder tasks, or raise "
    "rollout.group_size",
}
