"""`Series`: converts records to one curve per metric."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agentrl.tracking.metrics import Kind, StepRecord

Curve = tuple[NDArray[np.float64], NDArray[np.float64]]
"""x and y, f64[N] each, without undefined points."""


class Series:
    """The curves of a run, over steps or over running time."""

    def __init__(self, records: Sequence[StepRecord]) -> None:
        self._records: dict[Kind, list[StepRecord]] = {
            "train": [r for r in records if r.kind == "train"],
            "validation": [r for r in records if r.kind == "validation"],
        }
        self.num_records = len(records)
        self.last_step = max((r.step for r in records), default=0)
        self.wall_s = max((r.wall_s for r in records), default=0.0)

    def train(self, name: str, *, over_minutes: bool = False) -> Curve:
        return self._curve("train", name, over_minutes)

    def validation(self, name: str, *, over_minutes: bool = False) -> Curve:
        return self._curve("validation", name, over_minutes)

    def names(self, kind: Kind, prefix: str) -> list[str]:
        """Return the remainders of all metric names with `prefix`, sorted: for example agents or outcomes."""
        return sorted(
            {
                name.removeprefix(prefix)
                for r in self._records[kind]
                for name in r.values
                if name.startswith(prefix)
            }
        )

    def stacked(self, names: Sequence[str]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return steps f64[N] and values f64[len(names), N] of the training records; missing values are 0."""
        records = self._records["train"]
        values = [[r.values.get(name, 0.0) for r in records] for name in names]
        return np.array([r.step for r in records], float), np.nan_to_num(
            np.array(values, float).reshape(len(names), len(records))
        )

    def _curve(self, kind: Kind, name: str, over_minutes: bool) -> Curve:
        points = [
            (r.wall_s / 60 if over_minutes else r.step, r.values[name])
            for r in self._records[kind]
            if name in r.values
        ]
        array = np.array(points, float).reshape(-1, 2)
        array = array[np.isfinite(array).all(axis=1)]
        return array[:, 0], array[:, 1]


def smooth(values: NDArray[np.float64], *, span: int) -> NDArray[np.float64]:
    """Return the centred moving mean over `span` points (odd), over fewer at both ends; f64[N]."""
    window = np.ones(span)
    return np.convolve(values, window, mode="same") / np.convolve(np.ones(len(values)), window, mode="same")


def windows(steps: NDArray[np.float64], *, at_most: int) -> list[NDArray[np.int64]]:
    """Split the places of N steps into at most so many windows of consecutive steps, about equally long."""
    return [
        places
        for places in np.array_split(np.arange(len(steps)), max(1, min(len(steps), at_most)))
        if len(places)
    ]
