"""Which of the ready groups make the next batch. A sampler is a pure choice: the ledger says what is ready, within the bound, and open."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A complete group.

    number: of its drawing. order: counts leases. owner: whose attempts it is made of. finished: counts groups as they become ready.
    members: of its attempts, ascending. versions: of all its action tokens, each once; none when the policy sampled no token of it.
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
        """Version of the oldest token, -1 without any."""
        return min(self.versions, default=-1)


Lag = Callable[[ReadyGroup], int]
Sampler = Callable[[Sequence[ReadyGroup], int, Lag, int], list[ReadyGroup] | None]
"""(fresh, num_groups, lag, lowest open number) -> the batch, in its order, or None while it cannot be made."""


def fifo(fresh: Sequence[ReadyGroup], num_groups: int, lag: Lag, open_number: int) -> list[ReadyGroup] | None:
    """Oldest lease first."""
    return _first(sorted(fresh, key=lambda group: group.order), num_groups)


def freshest(fresh: Sequence[ReadyGroup], num_groups: int, lag: Lag, open_number: int) -> list[ReadyGroup] | None:
    """Smallest lag first, of equal ones the oldest lease."""
    return _first(sorted(fresh, key=lambda group: (lag(group), group.order)), num_groups)


def windowed(fresh: Sequence[ReadyGroup], num_groups: int, lag: Lag, open_number: int) -> list[ReadyGroup] | None:
    """First finished first; more are in flight than needed (`buffer.oversample`), and what waits too long is dropped for its age."""
    return _first(sorted(fresh, key=lambda group: group.finished), num_groups)


def in_order(fresh: Sequence[ReadyGroup], num_groups: int, lag: Lag, open_number: int) -> list[ReadyGroup] | None:
    """As they were drawn, so that batch k is made of the same tasks in every run: nothing is taken past a group that is still open."""
    batch = _first(sorted(fresh, key=lambda group: group.number), num_groups)
    return batch if batch is not None and batch[-1].number < open_number else None


def _first(groups: Sequence[ReadyGroup], num_groups: int) -> list[ReadyGroup] | None:
    return list(groups[:num_groups]) if len(groups) >= num_groups else None


SAMPLERS: Mapping[str, Sampler] = {"fifo": fifo, "freshest": freshest, "windowed": windowed, "in_order": in_order}
