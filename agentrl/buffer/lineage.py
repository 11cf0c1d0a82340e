"""The tree of published versions, which gives the lag between two versions even after a rollback.

Versions are never reused. In a run without rollbacks, the lag of a token is the learner's version minus the
token's version. Restored weights are published under a new version; the versions in between become an
abandoned branch:

    0 - 1 - 2 - 3 - 4          steps 3 and 4 are undone,
             \\
              5 - 6            the weights of 2 are published as 5

The lag is the distance in this tree. A token of version 4 has lag 3 at version 6: 2 steps back and 1 forward.
A token of version 2 has lag 0 at version 5, because the weights are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.types import NO_VERSION


class Lineage:
    """The tree of published versions. Publishes and rollbacks must be reported in order of time."""

    def __init__(self) -> None:
        self._depths: dict[int, int] = {}  # version -> its distance from the root
        # version -> depth at which its branch leaves the current branch: lag = (depth - fork) + (here - fork)
        self._forks: dict[int, int] = {}
        self._by_step: dict[int, int] = {}  # step -> depth of its publish, on the current branch
        self._current = NO_VERSION
        self._restored: int | None = None  # after a rollback: depth of the weights to publish next

    @classmethod
    def of(cls, publishes: Iterable[tuple[int, int]]) -> Lineage:
        """Return the lineage of (version, step) pairs in order of publishing.

        A step that is not larger than the one before means a rollback to that step.
        """
        lineage, last = cls(), -1
        for version, step in publishes:
            if step <= last:
                lineage.roll_back(step)
            lineage.publish(version, step)
            last = step
        return lineage

    @property
    def version(self) -> int:
        """The newest version; NO_VERSION before the first publish."""
        return self._current

    @property
    def versions(self) -> list[int]:
        """All versions of the tree, in the order in which they were published."""
        return list(self._depths)

    @property
    def step(self) -> int:
        """The step after which the weights of the current branch were published last; -1 before the first."""
        return max(self._by_step, default=-1)

    def publish(self, version: int, step: int) -> None:
        """Add a version whose weights are those after `step`.

        Raises:
            ValueError: the version is not newer than the last one.
        """
        if version <= self._current:
            raise ValueError(
                f"version {version} was published after version {self._current}: versions must increase"
            )
        if self._restored is not None:
            depth = self._restored
        else:
            depth = self._depths[self._current] + version - self._current if self._depths else 0
        self._depths[version] = self._forks[version] = depth
        self._by_step[step] = depth
        self._current, self._restored = version, None

    def roll_back(self, step: int) -> None:
        """Return to the weights after `step`, which are published next.

        If `step` was never published, the newest published step before it is used, or else the first publish.
        """
        known = [s for s in self._by_step if s <= step]
        depth = self._by_step[max(known)] if known else min(self._depths.values(), default=0)
        self._forks = {version: min(fork, depth) for version, fork in self._forks.items()}
        self._by_step = {s: d for s, d in self._by_step.items() if s <= step}
        self._restored = depth

    @property
    def _here(self) -> int:
        return self._restored if self._restored is not None else self._depths[self._current]

    def lag(self, version: int) -> int:
        """Return the lag of `version` behind the current weights, in versions; 0 for NO_VERSION.

        The lag of an unknown version is the difference of the version numbers.
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
        return np.array([self.lag(int(version)) for version in known], dtype=np.int32)[
            where.reshape(versions.shape)
        ]

    def copy(self) -> Lineage:
        other = Lineage()
        other._depths, other._forks, other._by_step = (
            dict(self._depths),
            dict(self._forks),
            dict(self._by_step),
        )
        other._current, other._restored = self._current, self._restored
        return other

    def state(self) -> dict[str, Any]:
        """Return the whole tree as JSON values."""
        return {
            "current": self._current,
            "restored": self._restored,
            "depths": [[v, d, self._forks[v]] for v, d in self._depths.items()],
            "steps": list(self._by_step.items()),
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Lineage:
        """Return the lineage that `state` describes."""
        lineage = cls()
        lineage._current, lineage._restored = state["current"], state.get("restored")
        lineage._depths = {version: depth for version, depth, _ in state["depths"]}
        lineage._forks = {version: fork for version, _, fork in state["depths"]}
        lineage._by_step = dict(map(tuple, state["steps"]))
        return lineage
