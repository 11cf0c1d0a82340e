"""Compare two evaluations of the same problems: difference, significance, problems won and lost."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl.errors import DataError
from agentrl.extras.research.paired import sign_flip_test
from agentrl.figures.attempts import EvaluatedAttempt
from agentrl.figures.intervals import difference_interval
from agentrl.figures.summary import OVERALL, Estimate, by_problem, share

MIN_CHANGED = 6
"""With fewer problems won or lost, p is above 0.05 even
if all are on one side: with 5, p = 2 / 2**5 = 0.0625.
"""

Key = tuple[str, str]
"""Data source and task id of a problem."""


@dataclass(frozen=True, slots=True)
class ProblemPair:
    """One problem in both evaluations.

    `accuracy_a` and `accuracy_b` are means over the scored attempts; `num_a` and `num_b` are their numbers.
    """

    source: str
    problem: str
    accuracy_a: float
    accuracy_b: float
    num_a: int
    num_b: int

    @property
    def difference(self) -> float:
        return self.accuracy_b - self.accuracy_a


@dataclass(frozen=True, slots=True)
class Difference:
    """Result of a comparison on one data source, or on all (`name` is OVERALL).

    Attributes:
        difference: accuracy of B minus that of A, a mean over problems, with its 95 % interval.
        p_value: two-sided, of the sign-flip test.
        is_exact: the test used all sign patterns, not a sample.
        num_won: problems with a higher mean accuracy in B.
        num_lost: problems with a lower mean accuracy in B.
    """

    name: str
    num_problems: int
    accuracy_a: Estimate
    accuracy_b: Estimate
    difference: Estimate
    p_value: float
    is_exact: bool
    num_won: int
    num_lost: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """B against A.

    Attributes:
        won, lost: problems, largest difference first.
        notes: one line for each reason why problems were left out.
    """

    sources: tuple[Difference, ...]
    overall: Difference
    won: tuple[ProblemPair, ...]
    lost: tuple[ProblemPair, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return dataclasses.asdict(self)


def compare(
    a: Sequence[EvaluatedAttempt], b: Sequence[EvaluatedAttempt], *, only_common: bool = False
) -> Comparison:
    """Compare two evaluations problem by problem.

    `only_common`: leave out problems that only one evaluation has.

    Raises:
        DataError: the problems differ, unless `only_common`; or no problem has a score in both.
    """
    in_a, in_b = by_problem(a), by_problem(b)
    notes = _check_problems(in_a, in_b, only_common=only_common)
    common = [key for key in in_a if key in in_b]
    pairs = [pair for key in common if (pair := _pair(key, in_a[key], in_b[key])) is not None]
    if not pairs:
        raise DataError(f"none of the {len(common)} problems in both evaluations has a score in both")
    if len(pairs) < len(common):
        notes = (
            *notes,
            f"{len(common) - len(pairs)} of {len(common)} problems have no score in one of the two "
            "evaluations and are left out",
        )
    by_source: defaultdict[str, list[ProblemPair]] = defaultdict(list)
    for pair in pairs:
        by_source[pair.source].append(pair)
    overall = _difference(OVERALL, pairs)
    if (num_changed := overall.num_won + overall.num_lost) < MIN_CHANGED:
        notes = (
            *notes,
            f"only {num_changed} problems were won or lost: with fewer than {MIN_CHANGED}, the p-value "
            "cannot be below 0.05",
        )
    ranked = sorted(pairs, key=lambda pair: (-abs(pair.difference), pair.source, pair.problem))
    return Comparison(
        sources=tuple(_difference(name, members) for name, members in sorted(by_source.items())),
        overall=overall,
        won=tuple(pair for pair in ranked if pair.difference > 0),
        lost=tuple(pair for pair in ranked if pair.difference < 0),
        notes=notes,
    )


def _check_problems(
    a: Mapping[Key, Sequence[EvaluatedAttempt]],
    b: Mapping[Key, Sequence[EvaluatedAttempt]],
    *,
    only_common: bool,
) -> tuple[str, ...]:
    num_common = len(a.keys() & b.keys())
    only_a, only_b = len(a) - num_common, len(b) - num_common
    if not only_a and not only_b:
        return ()
    found = (
        f"{num_common} problems are in both evaluations, {only_a} only in the first, {only_b} only in the "
        "second"
    )
    if not num_common:
        raise DataError(
            f"the evaluations have no problem in common: the first has {len(a)}, the second {len(b)}; check "
            "that both used the same files"
        )
    if not only_common:
        raise DataError(f"{found}; use --common to compare the problems in both")
    return (f"{found}: only the problems in both are compared",)


def _pair(key: Key, a: Sequence[EvaluatedAttempt], b: Sequence[EvaluatedAttempt]) -> ProblemPair | None:
    scores_a = [attempt.accuracy for attempt in a if attempt.accuracy is not None]
    scores_b = [attempt.accuracy for attempt in b if attempt.accuracy is not None]
    if not scores_a or not scores_b:
        return None
    return ProblemPair(
        *key, sum(scores_a) / len(scores_a), sum(scores_b) / len(scores_b), len(scores_a), len(scores_b)
    )


def _difference(name: str, pairs: Sequence[ProblemPair]) -> Difference:
    values_a, values_b = np.array([(pair.accuracy_a, pair.accuracy_b) for pair in pairs]).T
    differences = values_b - values_a
    low, high = difference_interval(differences)
    # Sorted, so that the result of a sampled test does not depend on the order of the files.
    test = sign_flip_test(
        np.sort(differences),
        num_attempts=math.lcm(*(count for pair in pairs for count in (pair.num_a, pair.num_b))),
    )
    accuracy_a, accuracy_b = share(values_a), share(values_b)
    assert accuracy_a, "a difference has problems"
    assert accuracy_b, "a difference has problems"
    return Difference(
        name=name,
        num_problems=len(pairs),
        accuracy_a=accuracy_a,
        accuracy_b=accuracy_b,
        difference=Estimate(float(differences.mean()), float(low), float(high)),
        p_value=test.p_value,
        is_exact=test.is_exact,
        num_won=int((differences > 0).sum()),
        num_lost=int((differences < 0).sum()),
    )
