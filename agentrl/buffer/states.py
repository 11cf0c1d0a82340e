"""The state of all groups as a function of events. `Ledger` decides which events happen."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any, assert_never

from agentrl.buffer.curriculum import Curriculum, restore_curriculum
from agentrl.buffer.events import Event, EventKind
from agentrl.buffer.lineage import Lineage
from agentrl.buffer.samplers import ReadyGroup
from agentrl.errors import CheckpointError
from agentrl.types import BufferCounts, HeldLease

FORMAT = 2
"""Format number of `GroupStates.state`."""

EXPIRED = "expired"
OUTRUN = "outrun"
OWNER_LOST = "owner_lost"


@dataclass(slots=True)
class Play:
    """One owner's lease of a group and the members that it delivered."""

    order: int
    version: int  # newest version at the time of the lease: no token is older
    since: float  # start of the lease in seconds, on the clock of the caller of `lease`
    members: dict[int, tuple[int, ...]] = field(
        default_factory=dict
    )  # member -> versions of its action tokens
    left_out: set[int] = field(default_factory=set)
    accuracies: list[float] = field(default_factory=list)  # of the members that have one


@dataclass(slots=True)
class OpenGroup:
    """A group that is drawn but not complete. It is queued while no owner plays it, leased otherwise."""

    number: int
    num_leases: int = 0
    num_expired: int = 0  # leases
    plays: dict[str, Play] = field(default_factory=dict)  # by owner


class GroupStates:
    """The state of all groups. Everybody may read it.

    Only `apply` changes it, and replaying the same events gives the same state. The start times of leases are
    no part of it: they are on the clock of whoever leases.

    lineage: the tree of published versions.
    drawn: number of groups drawn.
    queued, leased: groups that are drawn but not complete, by id.
    ready: complete groups that no batch has consumed, by id.
    batches: groups of each step that can still be undone: step -> group id -> group.
    step: step of the last batch taken.
    settled: newest step that can no longer be undone.
    consumed: number of groups in batches that were not undone.
    published: number of consumed groups whose update is published: k * B.
    dropped: number of dropped groups, by reason.
    discarded: number of members that nothing was learned from, by reason.
    released: owners that are dead.
    """

    def __init__(self, group_size: int, curriculum: Curriculum | None) -> None:
        self._group_size = group_size
        self._curriculum = curriculum
        self._next_draw: int | None = None  # drawn from the curriculum, not yet leased
        self._num_leases = 0
        self._num_finished = 0
        self._plays: OrderedDict[tuple[int, str], Play] = OrderedDict()  # (group id, owner) -> play, by order
        self._held: dict[str, dict[int, None]] = {}  # owner -> its groups, by order
        self.lineage = Lineage()
        self.drawn = 0
        self.queued: dict[int, OpenGroup] = {}
        self.leased: dict[int, OpenGroup] = {}
        self.ready: dict[int, ReadyGroup] = {}
        self.batches: dict[int, dict[int, ReadyGroup]] = {}
        self.step = 0
        self.settled = 0
        self.consumed = 0
        self.published = 0
        self.dropped: Counter[str] = Counter()
        self.discarded: Counter[str] = Counter()
        self.released: set[str] = set()

    # ------------------------------------------------------------------------------------------------ queries

    @property
    def version(self) -> int:
        """The policy's newest published version; NO_VERSION before the first publish."""
        return self.lineage.version

    def play(self, owner: str, group_id: int) -> Play | None:
        """Return the owner's lease of a group; None if `owner` does not hold it."""
        group = self.leased.get(group_id)
        return None if group is None else group.plays.get(owner)

    def plays(self) -> Iterator[tuple[int, str, Play]]:
        """Yield all leases as (group id, owner, play), oldest first."""
        for (group_id, owner), play in self._plays.items():
            yield group_id, owner, play

    def held_by(self, owner: str) -> list[int]:
        """Return the groups that `owner` plays, oldest lease first."""
        return list(self._held.get(owner, ()))

    def owners(self) -> list[str]:
        """Return the names of all owners that hold a lease."""
        return sorted(self._held)

    def batch(self, step: int) -> list[ReadyGroup]:
        """Return the groups that `step` consumed, in order; [] if `step` was never taken or is settled."""
        return list(self.batches.get(step, {}).values())

    def lag(self, group: ReadyGroup) -> int:
        """Return the largest lag of the group's action tokens, in versions; 0 if it has none."""
        return max(map(self.lineage.lag, group.versions), default=0)

    def next_draw(self) -> int:
        """Return the id of the group to be drawn next. Idempotent until it is leased."""
        if self._next_draw is None:
            self._next_draw = self.drawn if self._curriculum is None else self._curriculum.draw()
        return self._next_draw

    def counts(self) -> BufferCounts:
        return BufferCounts(
            drawn=self.drawn,
            queued=len(self.queued),
            leased=len(self.leased),
            ready=len(self.ready),
            consumed=self.consumed,
            dropped=dict(self.dropped),
            discarded={reason: count for reason, count in self.discarded.items() if count},
        )

    def held_leases(self, now: float) -> list[HeldLease]:
        """Return all held leases, oldest first. `now` is on the clock of the caller of `lease`."""
        found = [
            HeldLease(group_id, owner, now - play.since, len(play.members))
            for group_id, owner, play in self.plays()
        ]
        return sorted(found, key=lambda lease: -lease.age_s)

    # ------------------------------------------------------------------------------------------------- events

    def apply(self, event: Event) -> None:
        """Apply a recorded event."""
        match event.kind:
            case EventKind.LEASED:
                self._lease(event)
            case EventKind.ADDED:
                self._add(event)
            case EventKind.LEFT_OUT:
                self._leave_out(event)
            case EventKind.DISCARDED:
                self.discarded[event.reason] += 1
            case EventKind.QUEUED:
                self._queue(event)
            case EventKind.DROPPED:
                self._drop(event)
            case EventKind.CONSUMED:
                self._consume(event)
            case EventKind.RETURNED:
                self.ready[event.group_id] = self._undo(event)
            case EventKind.REQUEUED:
                self._requeue(event)
            case EventKind.PUBLISHED:
                self._publish(event)
            case EventKind.ROLLED_BACK:
                self.lineage.roll_back(event.step)
                self.step = event.step
            case EventKind.RELEASED:
                self.released.add(event.owner)
            case EventKind.SETTLED:
                self.settled = event.step
                self.batches = {step: batch for step, batch in self.batches.items() if step > event.step}
            case EventKind.IMPORTED:
                self._load(json.loads(event.reason))
            case EventKind.SNAPSHOT:
                self._load_snapshot(json.loads(event.reason)["ledger"])
            case _:
                assert_never(event.kind)

    def _lease(self, event: Event) -> None:
        group = self.queued.pop(event.group_id, None) or self.leased.get(event.group_id)
        if group is None:
            self.next_draw()  # on a replay, the curriculum has not drawn it yet
            self._next_draw = None
            group = OpenGroup(self.drawn)
            self.drawn += 1
        self.leased[event.group_id] = group
        self._begin_play(event.group_id, event.owner, Play(self._num_leases, self.version, 0.0))
        group.num_leases += 1
        self._num_leases += 1

    def _begin_play(self, group_id: int, owner: str, play: Play) -> None:
        self.leased[group_id].plays[owner] = self._plays[group_id, owner] = play
        self._held.setdefault(owner, {})[group_id] = None

    def _end_play(self, group_id: int, owner: str) -> None:
        """Forget a lease in the order of leases; its group forgets it by itself."""
        del self._plays[group_id, owner]
        del self._held[owner][group_id]
        if not self._held[owner]:
            del self._held[owner]

    def _add(self, event: Event) -> None:
        play = self.leased[event.group_id].plays[event.owner]
        play.members[event.member] = event.versions
        if event.accuracy is not None:
            play.accuracies.append(event.accuracy)
        self._complete(event.group_id, event.owner)

    def _leave_out(self, event: Event) -> None:
        self.leased[event.group_id].plays[event.owner].left_out.add(event.member)
        self.discarded[event.reason] += 1
        self._complete(event.group_id, event.owner)

    def _complete(self, group_id: int, owner: str) -> None:
        """Make the group ready if `owner` has delivered or left out every member."""
        group = self.leased[group_id]
        play = group.plays[owner]
        if len(play.members) + len(play.left_out) < self._group_size:
            return
        versions = tuple(sorted({version for own in play.members.values() for version in own}))
        ready = ReadyGroup(
            group_id,
            group.number,
            play.order,
            owner,
            self._num_finished,
            tuple(sorted(play.members)),
            versions,
        )
        self._num_finished += 1
        self.discarded[OUTRUN] += sum(
            len(other.members) for other in group.plays.values() if other is not play
        )
        self.ready[group_id] = ready
        self._close(group_id)
        if self._curriculum is not None:
            self._curriculum.observe(group_id, play.accuracies)

    def _close(self, group_id: int) -> None:
        """Remove a leased group with all its leases."""
        for owner in self.leased.pop(group_id).plays:
            self._end_play(group_id, owner)

    def _queue(self, event: Event) -> None:
        group = self.leased[event.group_id]
        self.discarded[event.reason] += len(group.plays.pop(event.owner).members)
        group.num_expired += event.reason == EXPIRED
        self._end_play(event.group_id, event.owner)
        if not group.plays:
            self.queued[event.group_id] = self.leased.pop(event.group_id)

    def _drop(self, event: Event) -> None:
        if event.group_id in self.leased:
            self._close(event.group_id)
        elif self.ready.pop(event.group_id, None) is None:
            step = next(step for step, batch in self.batches.items() if event.group_id in batch)
            del self.batches[step][event.group_id]
            self.consumed -= 1
            if not self.batches[step]:  # the whole batch was rejected: the step counts as not taken
                del self.batches[step]
                self.step = step - 1
        self.dropped[event.reason] += 1

    def _consume(self, event: Event) -> None:
        self.batches.setdefault(event.step, {})[event.group_id] = self.ready.pop(event.group_id)
        self.step = event.step
        self.consumed += 1

    def _publish(self, event: Event) -> None:
        self.lineage.publish(event.version, event.step)
        self.published = self.consumed
        if self._curriculum is not None:
            self._curriculum.finish_step()

    def _requeue(self, event: Event) -> None:
        group = self._undo(event)
        self.queued[event.group_id] = OpenGroup(group.number)
        self.discarded[event.reason] += len(group.members)

    def _undo(self, event: Event) -> ReadyGroup:
        """Take a group out of the batch of an undone step."""
        batch = self.batches[event.step]
        group = batch.pop(event.group_id)
        if not batch:
            del self.batches[event.step]
        self.consumed -= 1
        self.published = min(self.published, self.consumed)
        return group

    # --------------------------------------------------------------------------------------------- checkpoint

    def state(self) -> dict[str, Any]:
        """Return everything that a run in another folder needs to continue, as JSON values."""
        opened = {
            group_id: group for groups in (self.leased, self.queued) for group_id, group in groups.items()
        }
        return {
            "format": FORMAT,
            "group_size": self._group_size,
            "lineage": self.lineage.state(),
            "step": self.step,
            "drawn": self.drawn,
            "num_leases": self._num_leases,
            "num_finished": self._num_finished,
            "open": [
                [group_id, group.number, sum(len(p.members) for p in group.plays.values())]
                for group_id, group in opened.items()
            ],
            "ready": [asdict(group) for group in self.ready.values()],
            "consumed": self.consumed,
            "dropped": dict(self.dropped),
            "discarded": dict(self.discarded),
            **({} if self._curriculum is None else {"curriculum": self._curriculum.state()}),
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        """Load a saved state.

        Its lease owners are gone, so their groups are queued and their members discarded.
        """
        check_format(state)
        restore_curriculum(self._curriculum, state.get("curriculum"))
        self._next_draw = None
        self.lineage = Lineage.restored(state["lineage"])
        self.lineage.roll_back(state["step"])
        self.step = self.settled = state["step"]
        self.drawn, self._num_leases, self._num_finished = (
            state["drawn"],
            state["num_leases"],
            state["num_finished"],
        )
        self.queued = {group_id: OpenGroup(number) for group_id, number, _ in state["open"]}
        self.leased, self.batches = {}, {}
        self._plays, self._held = OrderedDict(), {}
        ready = (
            {**group, "members": tuple(group["members"]), "versions": tuple(group["versions"])}
            for group in state["ready"]
        )
        self.ready = {group["group_id"]: ReadyGroup(**group) for group in ready}
        self.consumed = self.published = state["consumed"]
        self.dropped, self.discarded = Counter(state["dropped"]), Counter(state["discarded"])
        self.discarded[OWNER_LOST] += sum(num_members for _, _, num_members in state["open"])

    # ----------------------------------------------------------------------------------------------- snapshot

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as JSON values: what all events so far led to, leases included."""
        return {
            "lineage": self.lineage.state(),
            "step": self.step,
            "settled": self.settled,
            "drawn": self.drawn,
            "next_draw": None if self._curriculum is None else self._next_draw,
            "num_leases": self._num_leases,
            "num_finished": self._num_finished,
            "consumed": self.consumed,
            "published": self.published,
            "dropped": dict(self.dropped),
            "discarded": dict(self.discarded),
            "released": sorted(self.released),
            "queued": _open_groups(self.queued),
            "leased": _open_groups(self.leased),
            "plays": [
                [*key, p.order, p.version, list(p.members.items()), sorted(p.left_out), p.accuracies]
                for key, p in self._plays.items()
            ],
            "ready": [astuple(group) for group in self.ready.values()],
            "batches": [
                [step, [astuple(group) for group in batch.values()]] for step, batch in self.batches.items()
            ],
            "curriculum": None if self._curriculum is None else self._curriculum.snapshot(),
        }

    def _load_snapshot(self, state: Mapping[str, Any]) -> None:
        restore_curriculum(self._curriculum, state["curriculum"])
        self.lineage = Lineage.restored(state["lineage"])
        self.step, self.settled = state["step"], state["settled"]
        self.drawn, self._next_draw = state["drawn"], state["next_draw"]
        self._num_leases, self._num_finished = state["num_leases"], state["num_finished"]
        self.consumed, self.published = state["consumed"], state["published"]
        self.dropped, self.discarded = Counter(state["dropped"]), Counter(state["discarded"])
        self.released = set(state["released"])
        self.queued = {group_id: OpenGroup(*numbers) for group_id, *numbers in state["queued"]}
        self.leased = {group_id: OpenGroup(*numbers) for group_id, *numbers in state["leased"]}
        self._plays, self._held = OrderedDict(), {}
        for group_id, owner, order, version, members, left_out, accuracies in state["plays"]:
            delivered = {member: tuple(versions) for member, versions in members}
            play = Play(order, version, 0.0, delivered, set(left_out), accuracies)
            self._begin_play(group_id, owner, play)
        self.ready = {group.group_id: group for group in map(_ready, state["ready"])}
        self.batches = {
            step: {group.group_id: group for group in map(_ready, batch)} for step, batch in state["batches"]
        }


def _open_groups(groups: Mapping[int, OpenGroup]) -> list[list[int]]:
    """Return the numbers of open groups as JSON values."""
    return [[id, group.number, group.num_leases, group.num_expired] for id, group in groups.items()]


def _ready(values: Sequence[Any]) -> ReadyGroup:
    """Return the group of which `values` are the fields, read from JSON."""
    group_id, number, order, owner, finished, members, versions = values
    return ReadyGroup(group_id, number, order, owner, finished, tuple(members), tuple(versions))


def check_format(state: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a saved state has another format."""
    if state.get("format") != FORMAT:
        raise CheckpointError(f"the buffer's state has format {state.get('format')!r}, expected {FORMAT}")
