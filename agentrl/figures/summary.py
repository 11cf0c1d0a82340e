"""Figures of an evaluation with their intervals: per data source, per difficulty and overall.

Every problem has the same weight, however many of its attempts have a score. A problem without any score is
left out of the means and counted separately.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.figures.attempts import EvaluatedAttempt
from agentrl.figures.intervals import mean_interval, share_interval
from agentrl.figures.statistics import MAX_VOTERS, best_of, majority_at, pass_at

Floats = NDArray[np.float64]
Problem = Sequence[EvaluatedAttempt]
"""All attempts at one problem."""

OVERALL = "all"
FEW = 5
"""With fewer solved problems, an interval rests on so little data that the reader is warned."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems with its 95 % interval.

    The limits are None if one problem does not allow an interval.
    """

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class EstimateAt:
    """A figure for k attempts, over the `num_problems` problems with at least k scored attempts."""

    k: int
    estimate: Estimate
    num_problems: int


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """Figures of one data source, of one difficulty within it, or of all (`name` is OVERALL).

    Figures are None, or empty, if no attempt has the data for them.

    Attributes:
        n: attempts per problem, scored or not; the maximum if they differ.
        num_scored_problems: problems with at least one score.
        num_solved: problems with at least one right attempt (accuracy 1).
        accuracy: mean@n.
        pass_at, majority_at, best_of_at: for k = 1..n. The majority vote needs answers, and k is at most
            MAX_VOTERS; `best_of_at` selects the attempt with the highest reward.
        format_rate, truncation_rate, num_tokens, num_turns, num_tool_calls, tool_use_rate: means over scored
            attempts.
        failure_rate: share of all attempts that have no score.
        by_difficulty: the same figures for each difficulty, ordered by name; empty if no row has a
            difficulty.
        warnings: one line each, to be shown with the figures.
    """

    name: str
    num_problems: int
    num_attempts: int
    n: int
    num_scored_problems: int
    num_scored: int
    num_solved: int
    accuracy: Estimate | None
    pass_at: tuple[EstimateAt, ...]
    majority_at: tuple[EstimateAt, ...]
    best_of_at: tuple[EstimateAt, ...]
    reward: Estimate | None
    format_rate: Estimate | None
    truncation_rate: Estimate | None
    num_tokens: Estimate | None
    num_turns: Estimate | None
    num_tool_calls: Estimate | None
    tool_use_rate: Estimate | None
    failure_rate: Estimate
    by_difficulty: tuple[SourceSummary, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EvalSummary:
    """Figures of an evaluation: one summary per data source, ordered by name, and one of all problems."""

    sources: tuple[SourceSummary, ...]
    overall: SourceSummary

    @property
    def shown(self) -> tuple[SourceSummary, ...]:
        """The sources, and the overall summary if there are several."""
        return (*self.sources, self.overall) if len(self.sources) > 1 else self.sources

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return dataclasses.asdict(self)


def summarise(attempts: Sequence[EvaluatedAttempt]) -> EvalSummary:
    """Return the figures of an evaluation. Nothing is sampled: the same attempts give the same figures.

    Raises:
        ValueError: there are no attempts.
    """
    if not attempts:
        raise ValueError("no attempts to summarise")
    problems = by_problem(attempts)
    by_source = _grouped(problems.values(), lambda problem: problem[0].source)
    sources = tuple(_summary(name, members) for name, members in sorted(by_source.items()))
    return EvalSummary(sources, _summary(OVERALL, list(problems.values())))


def estimate_at(figures: Iterable[EstimateAt], k: int | None) -> Estimate | None:
    """Return the estimate for k attempts; None if there is none."""
    return next((at.estimate for at in figures if at.k == k), None)


def by_problem(attempts: Iterable[EvaluatedAttempt]) -> Mapping[tuple[str, str], list[EvaluatedAttempt]]:
    """Return (data source, task id) -> the attempts at this problem, ordered by member."""
    found: defaultdict[tuple[str, str], list[EvaluatedAttempt]] = defaultdict(list)
    for attempt in attempts:
        found[attempt.source, attempt.problem].append(attempt)
    return {key: sorted(members, key=lambda attempt: attempt.member) for key, members in found.items()}


def is_right(attempt: EvaluatedAttempt) -> bool:
    """Return whether an attempt solved its problem. A partial accuracy below 1 is not right."""
    return attempt.accuracy is not None and attempt.accuracy >= 1.0


def share(values: Floats) -> Estimate | None:
    """Return the mean of one value in [0, 1] per problem, f64[P], with its interval.

    Returns None without problems.
    """
    if not len(values):
        return None
    low, high = share_interval(values)
    return Estimate(float(values.mean()), float(low), float(high))


def _summary(name: str, problems: Sequence[Problem], *, has_difficulties: bool = True) -> SourceSummary:
    attempts = [attempt for problem in problems for attempt in problem]
    scored = [found for problem in problems if (found := [a for a in problem if a.accuracy is not None])]
    num_solved = sum(any(map(is_right, problem)) for problem in scored)
    failure_rate = share(_means(problems, lambda a: a.accuracy is None))
    assert failure_rate is not None, "a summary has problems"
    summary = SourceSummary(
        name=name,
        num_problems=len(problems),
        num_attempts=len(attempts),
        n=max(map(len, problems)),
        num_scored_problems=len(scored),
        num_scored=sum(map(len, scored)),
        num_solved=num_solved,
        accuracy=share(_means(scored, lambda a: a.accuracy)),
        pass_at=_at(_passes(scored)),
        majority_at=_at([_majority(problem) for problem in scored])
        if any(a.answer is not None for a in attempts)
        else (),
        best_of_at=_at([_best(problem) for problem in scored]),
        reward=_mean(_means(scored, lambda a: a.reward)),
        format_rate=share(_means(scored, lambda a: a.format)),
        truncation_rate=share(_means(scored, lambda a: a.is_truncated)),
        num_tokens=_mean(_means(scored, lambda a: a.num_tokens)),
        num_turns=_mean(_means(scored, lambda a: a.num_turns)),
        num_tool_calls=_mean(_means(scored, lambda a: a.num_tool_calls)),
        tool_use_rate=share(_means(scored, lambda a: a.num_tool_calls > 0)),
        failure_rate=failure_rate,
        by_difficulty=_difficulties(problems) if has_difficulties else (),
        warnings=(),
    )
    return dataclasses.replace(summary, warnings=tuple(_warnings(summary, scored)))


def _difficulties(problems: Sequence[Problem]) -> tuple[SourceSummary, ...]:
    named = [problem for problem in problems if problem[0].difficulty is not None]
    by_name = _grouped(named, lambda problem: str(problem[0].difficulty))
    return tuple(_summary(name, members, has_difficulties=False) for name, members in sorted(by_name.items()))


def _warnings(summary: SourceSummary, scored: Sequence[Problem]) -> Iterable[str]:
    if summary.num_solved < FEW:
        solved = f"{summary.num_solved} of {summary.num_scored_problems} problems solved"
        yield f"{solved}, fewer than {FEW}: the figures are unreliable"
    if silent := summary.num_problems - summary.num_scored_problems:
        yield f"{silent} of {summary.num_problems} problems have no score and are left out"
    if short := sum(len(problem) < summary.n for problem in scored):
        yield (
            f"{short} of {summary.num_problems} problems have fewer than {summary.n} scored attempts: "
            "figures for k cover only problems with at least k"
        )


def _passes(problems: Sequence[Problem]) -> list[Floats]:
    num_attempts = np.array([len(problem) for problem in problems], np.int64)
    num_right = np.array([sum(map(is_right, problem)) for problem in problems], np.int64)
    return [row[:num] for row, num in zip(pass_at(num_attempts, num_right), num_attempts, strict=True)]


def _majority(problem: Problem) -> Floats:
    voters = problem[:MAX_VOTERS]
    return majority_at([a.answer for a in voters], [_known(a.accuracy) for a in voters])


def _best(problem: Problem) -> Floats:
    return best_of([_known(a.reward) for a in problem], [_known(a.accuracy) for a in problem])


def _known(value: float | None) -> float:
    assert value is not None, "scored attempts have an accuracy and a reward"
    return value


def _at(rows: Sequence[Floats]) -> tuple[EstimateAt, ...]:
    """Return one estimate per k.

    Each row is f64[n of the problem], so a problem counts only for k up to its own n.
    """
    found = []
    for k in range(1, max(map(len, rows), default=0) + 1):
        values = np.array([row[k - 1] for row in rows if len(row) >= k])
        # Rounding can move sums of probabilities slightly above 1
        estimate = share(np.clip(values, 0.0, 1.0))
        assert estimate is not None, "k is reached by a problem"
        found.append(EstimateAt(k, estimate, len(values)))
    return tuple(found)


def _mean(values: Floats) -> Estimate | None:
    if not len(values):
        return None
    low, high = mean_interval(values) or (None, None)
    return Estimate(float(values.mean()), low, high)


def _means(problems: Iterable[Problem], fact: Callable[[EvaluatedAttempt], float | None]) -> Floats:
    """Return f64[P], the mean of a fact over each problem's attempts that have it.

    Problems without it are left out.
    """
    rows = (
        [float(value) for attempt in problem if (value := fact(attempt)) is not None] for problem in problems
    )
    return np.array([sum(row) / len(row) for row in rows if row], np.float64)


def _grouped(problems: Iterable[Problem], name_of: Callable[[Problem], str]) -> Mapping[str, list[Problem]]:
    groups: defaultdict[str, list[Problem]] = defaultdict(list)
    for problem in problems:
        groups[name_of(problem)].append(problem)
    return groups
