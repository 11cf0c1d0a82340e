"""Which attempts of a batch say something about their task, and what."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from agentrl.data.trajectories import reward_sums
from agentrl.types import SCORED_OUTCOMES


def accuracies(batch: pa.RecordBatch) -> list[float | None]:
    """Return the accuracy of each trajectory in 0..1, as its row's own reward reports it, else whether it earned more than nothing.

    None: a failed attempt, a greedy one (it was sampled otherwise), or a reward whose accuracy is no share.
    """
    columns = (batch.column(name).to_pylist() for name in ("outcome", "is_greedy", "metrics"))
    return [
        None if is_greedy or outcome not in SCORED_OUTCOMES else _share(dict(metrics).get("accuracy", float(reward > 0)))
        for outcome, is_greedy, metrics, reward in zip(*columns, reward_sums(batch).tolist(), strict=True)
    ]


def scored_rewards(batch: pa.RecordBatch) -> NDArray[np.float64]:
    """Return f64[M]: what the M trajectories earned that did not fail; a failed one has no reward, which is not a reward of 0."""
    is_scored = np.array([outcome in SCORED_OUTCOMES for outcome in batch.column("outcome").to_pylist()], dtype=bool)
    return reward_sums(batch)[is_scored]


def _share(accuracy: float) -> float | None:
    return accuracy if 0.0 <= accuracy <= 1.0 else None
