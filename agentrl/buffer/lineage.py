"""How far apart two published policies are, also where a run went back to an older checkpoint.

Versions are never reused. While a run goes straight on, the lag of a token is the learner's version minus the token's. When
weights are restored, they are published again under a new version, and the versions between are a branch that ended:

    0 - 1 - 2 - 3 - 4          steps 3 and 4 are undone,
             \\
              5 - 6            the weights of 2 are published as 5

The lag of a token of version 4 at version 6 is what lies between them in this tree: 2 back and 1 forth. That of a token of version 2 at
version 5 is 0, for the weights are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.types import NO_VERSION


class Lineage:
    """The tree of published versions, told in the order of time."""

    def __init__(self) -> None:
        self._depths: dict[int, int] = {}  # version -> length of its way from the first, where each version counts
        self._forks: dict[int, int] = {}  # version -> depth at which its way leaves that of the current one
        self._by_step: dict[int, int] = {}  # step -> depth of its publish, of the current way
        self._current = NO_VERSION
        self._restored: int | None = None  # depth of the weights that the next publish is of

    @classmethod
    def of(cls, publishes: Iterable[tuple[int, int]]) -> Lineage:
        """Return the lineage of (version, step) in the order of publishing; a step that does not grow is where the run went back to."""
        lineage, last = cls(), -1
        for version, step in publishes:
            if step <= last:
                lineage.roll_back(step)
            lineage.publish(version, step)
            last = step
        return lineage

    @property
    def version(self) -> int:
        """The newest version; NO_VERSION before the first."""
        return self._current

    def publish(self, version: int, step: int) -> None:
        """Add a version, of the weights after `step`.

        Raises:
            ValueError: the version is not newer than the last.
        """
        if version <= self._current:
            raise ValueError(f"version {version} was published after version {self._current}: versions only grow")
        if self._restored is not None:
            depth = self._restored
        else:
            depth = self._depths[self._current] + version - self._current if self._depths else 0
        self._depths[version] = self._forks[version] = depth
        self._by_step[step] = depth
        self._current, self._restored = version, None

    def roll_back(self, step: int) -> None:
        """The weights are again those after `step`; a publish of them follows. Of a step that was never published: the oldest."""
        known = [s for s in self._by_step if s <= step]
        depth = self._by_step[max(known)] if known else min(self._depths.values(), default=0)
        self._forks = {version: min(fork, depth) for version, fork in self._forks.items()}
        self._by_step = {s: d for s, d in self._by_step.items() if s <= step}
        self._restored = depth

    @property
    def _here(self) -> int:
        return self._restored if self._restored is not None else self._depths.get(self._current, 0)

    def lag(self, version: int) -> int:
        """Return how far `version` is from the current weights; 0 for NO_VERSION.

        A version that was never told counts by its number, as if the run had gone straight on from it.
        """
        if version == NO_VERSION:
            return 0
        if version not in self._depths:
            return abs(self._current - version)
        fork = self._forks[version]
        return (self._depths[version] - fork) + (self._here - fork)

    def lags(self, versions: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the lag of each token: i32[T] for i32[T]."""
        known, where = np.unique(versions, return_inverse=True)
        return np.array([self.lag(int(version)) for version in known], dtype=np.int32)[where.reshape(versions.shape)]

    def copy(self) -> Lineage:
        other = Lineage()
        other._depths, other._forks, other._by_step = dict(self._depths), dict(self._forks), dict(self._by_step)
        other._current, other._restored = self._current, self._restored
        return other

    def state(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return {
            "current": self._current,
            "depths": [[v, d, self._forks[v]] for v, d in self._depths.items()],
            "steps": list(self._by_step.items()),
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Lineage:
        """Return what `state` described."""
        lineage = cls()
        lineage._current = state["current"]
        lineage._depths = {version: depth for version, depth, _ in state["depths"]}
        lineage._forks = {version: fork for version, _, fork in state["depths"]}
        lineage._by_step = dict(map(tuple, state["steps"]))
        return lineage
