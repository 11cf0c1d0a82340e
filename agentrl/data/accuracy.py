"""Accuracies and rewards of the attempts of a batch that carry information about their task."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from agentrl.data.trajectories import reward_sums
from agentrl.types import SCORED_OUTCOMES


def accuracies(batch: pa.RecordBatch) -> list[float | None]:
    """Return the accuracy of each trajectory in [0, 1].

    It is the accuracy that the task's reward reports, else 1.0 for a positive reward. None: the attempt
    failed, was greedy (sampled differently), or its reported accuracy is not in [0, 1].
    """
    columns = (batch.column(name).to_pylist() for name in ("outcome", "is_greedy", "metrics"))
    return [
        None if is_greedy or outcome not in SCORED_OUTCOMES else _share(dict(metrics).get("accuracy", float(reward > 0)))
        for outcome, is_greedy, metrics, reward in zip(*columns, reward_sums(batch).tolist(), strict=True)
    ]


def scored_rewards(batch: pa.RecordBatch) -> NDArray[np.float64]:
    """Return the rewards of the M trajectories that did not fail, f64[M].

    A failure has no reward; it is not a reward of 0.
    """
    is_scored = np.array([outcome in SCORED_OUTCOMES for outcome in batch.column("outcome").to_pylist()], dtype=bool)
    return reward_sums(batch)[is_scored]


def _share(accuracy: float) -> float | None:
    return accuracy if 0.0 <= accuracy <= 1.0 else None
