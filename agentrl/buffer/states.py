"""The state of all groups as a function of events. `Ledger` decides which events happen."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from agentrl.buffer.curriculum import Curriculum, restore_curriculum
from agentrl.buffer.events import Event
from agentrl.buffer.lineage import Lineage
from agentrl.buffer.samplers import ReadyGroup
from agentrl.errors import CheckpointError
from agentrl.types import BufferCounts, HeldLease

FORMAT = 2
"""Format number of `GroupStates.state`."""

OUTRUN = "outrun"
OWNER_LOST = "owner_lost"


@dataclass(slots=True)
class Play:
    """One owner's lease of a group and the members that it delivered."""

    order: int
    version: int  # newest version at the time of the lease: no token is older
    since: float  # start of the lease in seconds, on the clock of the caller of `lease`
    members: dict[int, tuple[int, ...]] = field(default_factory=dict)  # member -> versions of its action tokens
    left_out: set[int] = field(default_factory=set)
    accuracies: list[float] = field(default_factory=list)  # of the members that have one


@dataclass(slots=True)
class OpenGroup:
    """A group that is drawn but not complete. It is queued while no owner plays it, leased otherwise."""

    number: int
    num_leases: int = 0
    plays: dict[str, Play] = field(default_factory=dict)  # by owner


class GroupStates:
    """The state of all groups.

    Only `apply` changes it, and replaying the same events gives the same state.
    """

    def __init__(self, group_size: int, curriculum: Curriculum | None) -> None:
        self._group_size = group_size
        self._curriculum = curriculum
        self._next_draw: int | None = None  # drawn from the curriculum, not yet leased
        self.lineage = Lineage()
        self._drawn = 0
        self._num_leases = 0
        self._num_finished = 0
        self._queued: dict[int, OpenGroup] = {}
        self._leased: dict[int, OpenGroup] = {}
        self._ready: dict[int, ReadyGroup] = {}
        self._batches: dict[int, dict[int, ReadyGroup]] = {}  # step -> its groups; only steps that can be undone
        self._step = 0  # of the last batch taken
        self._settled = 0
        self._consumed = 0
        self._published = 0  # consumed groups whose update is published: k * B
        self._dropped: Counter[str] = Counter()
        self._discarded: Counter[str] = Counter()
        self._released: set[str] = set()

    # ----------------------------------------------------------------------------------------------------- state

    @property
    def version(self) -> int:
        """The policy's newest published version; NO_VERSION before the first publish."""
        return self.lineage.version

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def step(self) -> int:
        """The step of the last batch taken."""
        return self._step

    @property
    def settled(self) -> int:
        """The newest step that can no longer be undone."""
        return self._settled

    def is_released(self, owner: str) -> bool:
        return owner in self._released

    def held_by(self, owner: str) -> list[int]:
        """Return the groups that `owner` plays."""
        return [group_id for group_id, group in self._leased.items() if owner in group.plays]

    def batch(self, step: int) -> list[ReadyGroup]:
        """Return the groups that `step` consumed, in order; [] if `step` was never taken or is settled."""
        return list(self._batches.get(step, {}).values())

    def batches(self) -> Mapping[int, Mapping[int, ReadyGroup]]:
        """Return the groups of each step that can still be undone: step -> group id -> group."""
        return self._batches

    def ready_group(self, group_id: int) -> ReadyGroup:
        return self._ready[group_id]

    def ready_groups(self) -> list[ReadyGroup]:
        return list(self._ready.values())

    def owners(self) -> list[str]:
        """Return the names of all owners that hold a lease."""
        return sorted({owner for group in self._leased.values() for owner in group.plays})

    def lag(self, group: ReadyGroup) -> int:
        """Return the largest lag of the group's action tokens, in versions; 0 if it has none."""
        return max(map(self.lineage.lag, group.versions), default=0)

    # ----------------------------------------------------------------------------------------------------- events

    def apply(self, event: Event) -> None:
        """Apply a recorded event."""
        getattr(self, f"_on_{event.kind}")(event)

    def _on_leased(self, event: Event) -> None:
        group = self._queued.pop(event.group_id, None) or self._leased.get(event.group_id)
        if group is None:
            if self._curriculum is not None and self._next_draw is None:
                self._curriculum.draw()
            self._next_draw = None
            group = OpenGroup(self._drawn)
            self._drawn += 1
        self._leased[event.group_id] = group
        group.plays[event.owner] = Play(self._num_leases, self.version, 0.0)
        group.num_leases += 1
        self._num_leases += 1

    def _on_added(self, event: Event) -> None:
        play = self._leased[event.group_id].plays[event.owner]
        play.members[event.member] = event.versions
        if event.accuracy is not None:
            play.accuracies.append(event.accuracy)
        self._complete(event.group_id, event.owner)

    def _on_left_out(self, event: Event) -> None:
        self._leased[event.group_id].plays[event.owner].left_out.add(event.member)
        self._discarded[event.reason] += 1
        self._complete(event.group_id, event.owner)

    def _complete(self, group_id: int, owner: str) -> None:
        """Make the group ready if `owner` has delivered or left out every member."""
        group = self._leased[group_id]
        play = group.plays[owner]
        if len(play.members) + len(play.left_out) < self._group_size:
            return
        versions = tuple(sorted({version for own in play.members.values() for version in own}))
        ready = ReadyGroup(group_id, group.number, play.order, owner, self._num_finished, tuple(sorted(play.members)), versions)
        self._num_finished += 1
        self._discarded[OUTRUN] += sum(len(other.members) for other in group.plays.values() if other is not play)
        self._ready[group_id] = ready
        del self._leased[group_id]
        if self._curriculum is not None:
            self._curriculum.observe(group_id, play.accuracies)

    def _on_discarded(self, event: Event) -> None:
        self._discarded[event.reason] += 1

    def _on_queued(self, event: Event) -> None:
        group = self._leased[event.group_id]
        self._discarded[event.reason] += len(group.plays.pop(event.owner).members)
        if not group.plays:
            self._queued[event.group_id] = self._leased.pop(event.group_id)

    def _on_dropped(self, event: Event) -> None:
        if self._leased.pop(event.group_id, None) is None and self._ready.pop(event.group_id, None) is None:
            step = next(step for step, batch in self._batches.items() if event.group_id in batch)
            del self._batches[step][event.group_id]
            self._consumed -= 1
            if not self._batches[step]:  # the whole batch was rejected: the step counts as not taken
                del self._batches[step]
                self._step = step - 1
        self._dropped[event.reason] += 1

    def _on_consumed(self, event: Event) -> None:
        self._batches.setdefault(event.step, {})[event.group_id] = self._ready.pop(event.group_id)
        self._step = event.step
        self._consumed += 1

    def _on_published(self, event: Event) -> None:
        self.lineage.publish(event.version, event.step)
        self._published = self._consumed
        if self._curriculum is not None:
            self._curriculum.finish_step()

    def _on_rolled_back(self, event: Event) -> None:
        self.lineage.roll_back(event.step)
        self._step = event.step

    def _on_returned(self, event: Event) -> None:
        self._ready[event.group_id] = self._undo(event)

    def _on_requeued(self, event: Event) -> None:
        group = self._undo(event)
        self._queued[event.group_id] = OpenGroup(group.number)
        self._discarded[event.reason] += len(group.members)

    def _undo(self, event: Event) -> ReadyGroup:
        batch = self._batches[event.step]
        group = batch.pop(event.group_id)
        if not batch:
            del self._batches[event.step]
        self._consumed -= 1
        self._published = min(self._published, self._consumed)
        return group

    def _on_released(self, event: Event) -> None:
        self._released.add(event.owner)

    def _on_settled(self, event: Event) -> None:
        self._settled = event.step
        self._batches = {step: batch for step, batch in self._batches.items() if step > event.step}

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
        """Return everything that a run in another folder needs to continue, as JSON values."""
        opened = {group_id: group for groups in (self._leased, self._queued) for group_id, group in groups.items()}
        return {
            "format": FORMAT,
            "lineage": self.lineage.state(),
            "step": self._step,
            "drawn": self._drawn,
            "num_leases": self._num_leases,
            "num_finished": self._num_finished,
            "open": [[group_id, group.number, sum(len(p.members) for p in group.plays.values())] for group_id, group in opened.items()],
            "ready": [asdict(group) for group in self._ready.values()],
            "consumed": self._consumed,
            "dropped": dict(self._dropped),
            "discarded": dict(self._discarded),
            **({} if self._curriculum is None else {"curriculum": self._curriculum.state()}),
        }

    def _on_imported(self, event: Event) -> None:
        """Load a saved state.

        Its lease owners are gone, so their groups are queued and their members discarded.
        """
        state = json.loads(event.reason)
        if state.get("format") != FORMAT:
            raise CheckpointError(f"the buffer's state has format {state.get('format')!r}, expected {FORMAT}")
        restore_curriculum(self._curriculum, state.get("curriculum"))
        self._next_draw = None
        self.lineage = Lineage.restored(state["lineage"])
        self.lineage.roll_back(state["step"])
        self._step = self._settled = state["step"]
        self._drawn, self._num_leases, self._num_finished = state["drawn"], state["num_leases"], state["num_finished"]
        self._queued = {group_id: OpenGroup(number) for group_id, number, _ in state["open"]}
        self._leased, self._batches = {}, {}
        ready = ({**group, "members": tuple(group["members"]), "versions": tuple(group["versions"])} for group in state["ready"])
        self._ready = {group["group_id"]: ReadyGroup(**group) for group in ready}
        self._consumed = self._published = state["consumed"]
        self._dropped, self._discarded = Counter(state["dropped"]), Counter(state["discarded"])
        self._discarded[OWNER_LOST] += sum(num_members for _, _, num_members in state["open"])

    def touch(self, now: float) -> None:
        """Set the start of all leases to `now`.

        Needed after replaying a journal, which was written under another clock.
        """
        for group in self._leased.values():
            for play in group.plays.values():
                play.since = now

    def held_leases(self, now: float) -> list[HeldLease]:
        """Return all held leases, oldest first. `now` is on the clock of the caller of `lease`."""
        held = [(group_id, owner, play) for group_id, group in self._leased.items() for owner, play in group.plays.items()]
        found = [HeldLease(group_id, owner, now - play.since, len(play.members)) for group_id, owner, play in held]
        return sorted(found, key=lambda lease: -lease.age_s)

    def oldest_lease(self) -> float | None:
        """Return the start of the oldest lease, in seconds of the caller's clock; None if nothing is leased."""
        return min((play.since for group in self._leased.values() for play in group.plays.values()), default=None)
