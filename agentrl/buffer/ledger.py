"""The life of every group: queued -> leased -> ready -> consumed, or dropped with a reason. No clock, no I/O, no threads.

The bound on staleness has two halves. With B groups per step, S the largest lag allowed, and k batches taken and published:

    admission     a group may be leased iff  consumed + ready + leased < (S + k + 1) * B
    consumption   a ready group whose oldest token lags by more than S is dropped, never taken

The first keeps the second rare: whoever is leased would be taken, in order, S batches from now at the latest. With S = 0
nothing is leased between a take and its publish.

A batch that does not wait for stragglers makes those too old that were leased S versions ago. One that waits for them drops none: the
first half leaves at most B groups of that age, so that they fit into it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agentrl.buffer.curriculum import Curriculum, restore_curriculum
from agentrl.errors import CheckpointError
from agentrl.types import NO_VERSION, BufferCounts

FORMAT = 1
"""Number of the form of `state`."""

STALE = "stale"
LATE = "late"
DUPLICATE = "duplicate"
OWNER_LOST = "owner_lost"
NO_VARIANCE = "no_variance"

Admission = Literal["waiting", "ready", "late", "duplicate"]
"""What became of a member: kept (its group still incomplete | complete with it), or discarded."""


@dataclass(slots=True)
class _Leased:
    owner: str
    order: int
    version: int  # at the lease: no token of the group is older
    members: dict[int, int] = field(default_factory=dict)  # member -> version of its oldest action token
    accuracies: list[float] = field(default_factory=list)  # of the members that say something about the task


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A complete group: `order` counts leases, `min_version` is NO_VERSION when the policy sampled no token of it."""

    group_id: int
    order: int
    min_version: int


class Ledger:
    """Knows where each group is; a group's id is the position of its task in the dataset, the next one or the curriculum's choice.

    An `owner` is one life of one rollout actor: a restarted actor needs a new name, or what its former self still had in
    flight could be taken for its own.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        group_size: int,
        total_groups: int | None = None,
        waits_for_stragglers: bool = False,
        curriculum: Curriculum | None = None,
    ) -> None:
        """Start empty.

        Args:
            groups_per_step: B.
            max_staleness: S, in versions.
            group_size: members of a complete group.
            total_groups: groups the run will consume; no more are leased than it still needs. None: endless.
            waits_for_stragglers: no batch is taken before every leased group is complete that would be too old for the next one.
            curriculum: chooses the tasks that are drawn; None: one position of the dataset after the other.
        """
        self._curriculum = curriculum
        self._waits_for_stragglers = waits_for_stragglers
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._group_size = group_size
        self._total_groups = total_groups
        self._version = NO_VERSION
        self._drawn = 0
        self._num_leases = 0
        self._queued: deque[int] = deque()
        self._leased: dict[int, _Leased] = {}
        self._ready: dict[int, ReadyGroup] = {}
        self._consumed = 0
        self._published = 0  # of the consumed ones, those whose update is published: k * B
        self._dropped: Counter[str] = Counter()
        self._discarded: Counter[str] = Counter()

    @property
    def version(self) -> int:
        """The policy's newest published version; NO_VERSION before the first."""
        return self._version

    @property
    def max_staleness(self) -> int:
        return self._max_staleness

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    # ------------------------------------------------------------------------------------------------- admission

    def can_lease(self) -> bool:
        """Say whether the bound admits one more group, and the run needs it."""
        # k * B is counted as groups, not as steps, so that a resumed run may change B.
        bound = self._published + (self._max_staleness + 1) * self._groups_per_step
        if self._total_groups is not None:
            bound = min(bound, self._total_groups)
        return self._consumed + len(self._ready) + len(self._leased) < bound

    def lease(self, owner: str) -> int:
        """Give `owner` a group to play: one queued again, else one that is drawn.

        Raises:
            ValueError: `can_lease` is False.
        """
        if not self.can_lease():
            raise ValueError("the bound on staleness admits no further group; ask can_lease first")
        if self._queued:
            group_id = self._queued.popleft()
        else:
            group_id = self._drawn if self._curriculum is None else self._curriculum.draw()
            self._drawn += 1
        self._leased[group_id] = _Leased(owner, self._num_leases, self._version)
        self._num_leases += 1
        return group_id

    def add_member(self, owner: str, group_id: int, member: int, min_version: int, accuracy: float | None = None) -> Admission:
        """Record a finished trajectory; with its last member the group becomes ready.

        Then the curriculum hears of it: a group that is dropped later, for its age or lack of variance, says no less of its task.
        `accuracy`: in 0..1; None: the member does not count.

        Raises:
            ValueError: there is no such member in a group.
        """
        if not 0 <= member < self._group_size:
            raise ValueError(f"group {group_id}: member {member} is not in 0..{self._group_size - 1}")
        leased = self._held(owner, group_id)
        if leased is None:
            self._discarded[LATE] += 1
            return "late"
        if member in leased.members:
            self._discarded[DUPLICATE] += 1
            return "duplicate"
        leased.members[member] = min_version
        if accuracy is not None:
            leased.accuracies.append(accuracy)
        if len(leased.members) < self._group_size:
            return "waiting"
        versions = [version for version in leased.members.values() if version != NO_VERSION]
        self._ready[group_id] = ReadyGroup(group_id, leased.order, min(versions, default=NO_VERSION))
        del self._leased[group_id]
        if self._curriculum is not None:
            self._curriculum.observe(group_id, leased.accuracies)
        return "ready"

    def drop(self, owner: str, group_id: int, reason: str) -> bool:
        """End a leased group for good; False (and nothing happens) when `owner` does not hold it."""
        if self._held(owner, group_id) is None:
            return False
        del self._leased[group_id]
        self._dropped[reason] += 1
        return True

    def drop_ready(self, group_id: int, reason: str) -> None:
        """End a complete group that no batch holds yet; the bound admits another in its place.

        Raises:
            ValueError: it is not ready.
        """
        if group_id not in self._ready:
            raise ValueError(f"group {group_id} is not ready: it cannot be dropped as a complete one")
        del self._ready[group_id]
        self._dropped[reason] += 1

    def release(self, owner: str) -> list[int]:
        """Queue all groups of a dead owner again, oldest lease first; members that had arrived are discarded."""
        held = [group_id for group_id, leased in self._leased.items() if leased.owner == owner]
        for group_id in held:
            self._discarded[OWNER_LOST] += len(self._leased.pop(group_id).members)
        self._queued.extend(held)
        return held

    def _held(self, owner: str, group_id: int) -> _Leased | None:
        leased = self._leased.get(group_id)
        return leased if leased is not None and leased.owner == owner else None

    # ----------------------------------------------------------------------------------------------- consumption

    def drop_stale(self) -> list[int]:
        """Drop the ready groups that no batch may hold any more, and return their ids."""
        stale = [group_id for group_id, group in self._ready.items() if self.lag(group) > self._max_staleness]
        for group_id in stale:
            del self._ready[group_id]
        self._dropped[STALE] += len(stale)
        return stale

    def take(self, num_groups: int) -> list[ReadyGroup] | None:
        """Consume the `num_groups` oldest leases among the ready groups within the bound; None if there are fewer, or stragglers.

        Raises:
            ValueError: num_groups is not in 1..groups_per_step: the bound admits no more at once.
        """
        if not 1 <= num_groups <= self._groups_per_step:
            raise ValueError(f"cannot take {num_groups} groups: a batch holds 1 to groups_per_step={self._groups_per_step}")
        if self._waits_for_stragglers and self._has_stragglers():
            return None
        fresh = [group for group in self._ready.values() if self.lag(group) <= self._max_staleness]
        if len(fresh) < num_groups:
            return None
        batch = sorted(fresh, key=lambda group: group.order)[:num_groups]
        for group in batch:
            del self._ready[group.group_id]
        self._consumed += len(batch)
        return batch

    def _has_stragglers(self) -> bool:
        return any(self._version - leased.version >= self._max_staleness for leased in self._leased.values())

    def reject(self, num_groups: int, reason: str) -> None:
        """Drop the last `num_groups` that were taken: nothing was learned from them, and the bound admits others in their place.

        Raises:
            ValueError: so many were not taken since the last publish.
        """
        if not 0 <= num_groups <= self._consumed - self._published:
            raise ValueError(f"cannot reject {num_groups} groups: {self._consumed - self._published} were taken since the last publish")
        self._consumed -= num_groups
        self._dropped[reason] += num_groups

    def advance(self, version: int) -> None:
        """Record that weights which learned from every batch taken so far are published as `version`.

        Raises:
            ValueError: the version is not newer than the last.
        """
        if version <= self._version:
            raise ValueError(f"version {version} was published after version {self._version}: versions only grow")
        self._version = version
        self._published = self._consumed
        if self._curriculum is not None:
            self._curriculum.finish_step()

    def lag(self, group: ReadyGroup) -> int:
        """Return the age of the group's oldest token, in versions; 0 for a group without any."""
        return 0 if group.min_version == NO_VERSION else self._version - group.min_version

    # ---------------------------------------------------------------------------------------------------- account

    def counts(self) -> BufferCounts:
        return BufferCounts(
            drawn=self._drawn,
            queued=len(self._queued),
            leased=len(self._leased),
            ready=len(self._ready),
            consumed=self._consumed,
            dropped={reason: count for reason, count in self._dropped.items() if count},
            discarded={reason: count for reason, count in self._discarded.items() if count},
        )

    def state(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return {
            "format": FORMAT,
            "version": self._version,
            "drawn": self._drawn,
            "num_leases": self._num_leases,
            "queued": list(self._queued),
            "leased": [{"group_id": group_id, "num_members": len(leased.members)} for group_id, leased in self._leased.items()],
            "ready": [{"group_id": g.group_id, "order": g.order, "min_version": g.min_version} for g in self._ready.values()],
            "consumed": self._consumed,
            "dropped": dict(self._dropped),
            "discarded": dict(self._discarded),
            **({} if self._curriculum is None else {"curriculum": self._curriculum.state()}),
        }

    def restore(self, state: Mapping[str, Any], *, version: int) -> None:
        """Become what `state` describes, with its weights now served as `version`.

        The owners of its leases are gone: their groups are queued, ahead of those that were.

        Raises:
            CheckpointError: the state has another format, or another curriculum than this run.
            ValueError: `version` is older than the state's.
        """
        if state.get("format") != FORMAT:
            raise CheckpointError(f"the buffer's state has format {state.get('format')!r}, expected {FORMAT}")
        if version < state["version"]:
            raise ValueError(f"version {version} is older than the state's {state['version']}: versions only grow")
        restore_curriculum(self._curriculum, state.get("curriculum"))
        self._version = version
        self._drawn = state["drawn"]
        self._num_leases = state["num_leases"]
        self._queued = deque([*(leased["group_id"] for leased in state["leased"]), *state["queued"]])
        self._leased = {}
        self._ready = {group["group_id"]: ReadyGroup(**group) for group in state["ready"]}
        self._consumed = self._published = state["consumed"]
        self._dropped = Counter(state["dropped"])
        self._discarded = Counter(state["discarded"])
        self._discarded[OWNER_LOST] += sum(leased["num_members"] for leased in state["leased"])
