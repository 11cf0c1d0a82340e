"""Samplers: which ready groups form the next batch.

They are pure functions; the ledger provides their inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A complete group.

    number: index in the order of draws.
    order: index in the order of leases.
    owner: the owner that played it.
    finished: index in the order in which groups became ready.
    members: members that have a trajectory, ascending.
    versions: distinct versions of all its action tokens; () if it has no action tokens.
    """

    group_id: int
    number: int
    order: int
    owner: str
    finished: int
    members: tuple[int, ...]
    versions: tuple[int, ...]

    @property
    def min_version(self) -> int:
        """Version of the oldest action token; -1 if there are none."""
        return min(self.versions, default=-1)


Lag = Callable[[ReadyGroup], int]
Sampler = Callable[[Sequence[ReadyGroup], int, Lag, int], list[ReadyGroup] | None]
"""(fresh groups, num_groups, lag, lowest number of an open group) -> the ordered batch; None if it is not
available yet.
"""


def fifo(fresh: Sequence[ReadyGroup], num_groups: int, lag: Lag, open_number: int) -> list[ReadyGroup] | None:
    """Take the oldest lease first."""
    return _first(sorted(fresh, key=lambda group: group.order), num_groups)


def freshest(
    fresh: Sequence[ReadyGroup], num_groups: int, lag: Lag, open_number: int
) -> list[ReadyGroup] | None:
    """Take the smallest lag first; ties go to the oldest lease."""
    return _first(sorted(fresh, key=lambda group: (lag(group), group.order)), num_groups)


def windowed(
    fresh: Sequence[ReadyGroup], num_groups: int, lag: Lag, open_number: int
) -> list[ReadyGroup] | None:
    """Take the groups that finished first.

    More groups are in flight than needed (`buffer.oversample`); groups that wait too long become stale and
    are dropped.
    """
    return _first(sorted(fresh, key=lambda group: group.finished), num_groups)


def in_order(
    fresh: Sequence[ReadyGroup], num_groups: int, lag: Lag, open_number: int
) -> list[ReadyGroup] | None:
    """Take groups in the order of draws, so that batch k has the same tasks in every run.

    No group is taken while a group drawn before it is still open.
    """
    batch = _first(sorted(fresh, key=lambda group: group.number), num_groups)
    return batch if batch is not None and batch[-1].number < open_number else None


def _first(groups: Sequence[ReadyGroup], num_groups: int) -> list[ReadyGroup] | None:
    return list(groups[:num_groups]) if len(groups) >= num_groups else None


SAMPLERS: Mapping[str, Sampler] = {
    "fifo": fifo,
    "freshest": freshest,
    "windowed": windowed,
    "in_order": in_order,
}
