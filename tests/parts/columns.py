"""Model outputs per token, as credit and the ranks get them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agentrl.controller.credit import Assessment
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.token_columns import TokenColumn, keep
from agentrl.learner.token_credit import TokenColumns
from agentrl.types import Group

Column = Sequence[NDArray[np.floating]] | None


def assessment_of(
    groups: Sequence[Group[AttemptFacts]],
    *,
    values: Column = None,
    kl: Column = None,
    kl_coefficient: float = 0.0,
    teacher_kl: Column = None,
    folder: str | None = None,
) -> Assessment:
    """Return what `assess` would for these columns, f[A] per trajectory; `folder`: where they are kept."""
    attempts = [t for group in groups for t in group.trajectories]

    def kept(column: Column) -> list[TokenColumn | None]:
        if column is None:
            return [None] * len(attempts)
        return [TokenColumn(len(n), ((0, n),)) for n in keep(column, folder)]

    def sums(attempt: AttemptFacts, column: NDArray[np.floating]) -> NDArray[np.float64]:
        parts = np.split(np.asarray(column, np.float64), np.cumsum([n for _, n in attempt.turns])[:-1])
        return np.array([part.sum() for part in parts]) if attempt.turns else np.empty(0)

    return Assessment(
        [TokenColumns(*three) for three in zip(kept(values), kept(kl), kept(teacher_kl), strict=True)],
        None if kl is None else [sums(*pair) for pair in zip(attempts, kl, strict=True)],
        kl_coefficient,
        None if teacher_kl is None else float(sum(own.sum(dtype=np.float64) for own in teacher_kl)),
    )
