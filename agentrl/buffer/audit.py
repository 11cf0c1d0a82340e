"""The audit of a journal: follows every group through its events, independently of the ledger's own code.

The audit makes no decisions. It only checks that each transition of a group is allowed, so a bug in the
ledger becomes visible. Its totals are compared with the counts that the run itself reported.

The replay buffer follows its own events with it as well. A snapshot of the journal keeps what the audit knows
of the events that it replaces, so an audit that begins with a snapshot has the totals of the whole run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.buffer.events import Event, EventKind
from agentrl.buffer.id_ranges import IdRanges
from agentrl.buffer.lineage import Lineage
from agentrl.buffer.states import OUTRUN, OWNER_LOST

QUEUED, LEASED, READY, CONSUMED, DROPPED = "queued", "leased", "ready", "consumed", "dropped"
MAX_PROBLEMS = 20
_NUMBERS = (
    "num_events",
    "num_taken",
    "num_rollbacks",
    "max_lag",
    "step",
    "settled",
    "num_problems",
    "problems",
)
"""Fields of an `Audit` that are JSON values as they are."""


@dataclass(slots=True)
class GroupLife:
    """State, owners and history of one group."""

    state: str = QUEUED
    players: dict[str, set[tuple[int, ...]]] = field(
        default_factory=dict
    )  # owner -> (member, *versions) of each
    num_members: int = 0  # members delivered by `last_owner`
    versions: set[int] = field(default_factory=set)  # of those members' action tokens
    step: int = -1
    dropped_for: str = ""
    num_leases: int = 0
    came_back: Counter[str] = field(
        default_factory=Counter
    )  # reason -> times it became queued or ready again
    last_owner: str = ""  # the owner that delivered or left out the last member

    def row(self) -> list[Any]:
        """Return the life as JSON values."""
        players = [[owner, sorted(members)] for owner, members in self.players.items()]
        numbers = [self.num_members, sorted(self.versions), self.step, self.dropped_for, self.num_leases]
        return [self.state, players, *numbers, dict(self.came_back), self.last_owner]

    @classmethod
    def of_row(cls, row: Sequence[Any]) -> GroupLife:
        """Return the life of which `row` are the JSON values."""
        state, players, num_members, versions, step, dropped_for, num_leases, came_back, last_owner = row
        return cls(
            state,
            {owner: {tuple(member) for member in members} for owner, members in players},
            num_members,
            set(versions),
            step,
            dropped_for,
            num_leases,
            Counter(came_back),
            last_owner,
        )


EndedGroup = tuple[int, int, str]
"""A group of which no further event can come: (id, step or -1, why it was dropped or "")."""


@dataclass(slots=True)
class Ended:
    """Totals of the groups that ended before the last snapshot; the journal's archive has them one by one.

    num_before: groups in the archive from before the import of a checkpoint, which are not in the totals.
    dropped, came_back: as `Audit.dropped` and `Audit.came_back`.
    """

    ids: IdRanges = field(default_factory=IdRanges)
    num_consumed: int = 0
    num_leases: int = 0
    num_before: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    came_back: Counter[str] = field(default_factory=Counter)

    @property
    def num_groups(self) -> int:
        return self.num_consumed + self.dropped.total()

    def count(self, lives: Mapping[int, GroupLife]) -> None:
        """Add groups."""
        self.ids.add(lives)
        for life in lives.values():
            self.num_leases += life.num_leases
            self.came_back.update(life.came_back)
            if life.state == DROPPED:
                self.dropped[life.dropped_for] += 1
            else:
                self.num_consumed += 1


@dataclass(slots=True)
class Audit:
    """Result of an audit.

    problems: the first MAX_PROBLEMS problems as readable lines. num_problems: number of all problems, 0 if
        all balances.
    """

    groups: dict[int, GroupLife] = field(default_factory=dict)
    lineage: Lineage = field(default_factory=Lineage)
    discarded: Counter[str] = field(default_factory=Counter)  # single attempts by reason
    released: set[str] = field(default_factory=set)
    num_events: int = 0
    num_taken: int = 0  # groups taken into batches, including those of undone steps
    num_rollbacks: int = 0
    max_lag: int = 0  # largest lag of a token when its group was taken
    step: int = 0
    settled: int = 0
    imported: Counter[str] = field(
        default_factory=Counter
    )  # state -> groups of a checkpoint of another folder
    ended: Ended = field(default_factory=Ended)
    problems: list[str] = field(default_factory=list)
    num_problems: int = 0

    @property
    def is_balanced(self) -> bool:
        return self.num_problems == 0

    def counts(self) -> dict[str, int]:
        """Return the number of groups by state, including those of an imported checkpoint."""
        states = Counter(life.state for life in self.groups.values()) + self.imported
        states += Counter({CONSUMED: self.ended.num_consumed, DROPPED: self.ended.dropped.total()})
        return {state: states[state] for state in (QUEUED, LEASED, READY, CONSUMED, DROPPED)}

    def balance(self) -> dict[str, int]:
        """Return the numbers in which the audit and the ledger must agree."""
        counts = self.counts()
        return {
            QUEUED: counts[QUEUED],
            "leased or ready": counts[LEASED] + counts[READY],  # a group becomes ready without an event
            CONSUMED: counts[CONSUMED],
            DROPPED: counts[DROPPED],
            "discarded attempts": self.discarded.total(),
            "step": self.step,
        }

    def dropped(self) -> dict[str, int]:
        """Return the number of dropped groups by reason."""
        dropped = Counter(life.dropped_for for life in self.groups.values() if life.state == DROPPED)
        return dict(dropped + self.ended.dropped)

    def came_back(self) -> dict[str, int]:
        """Return how often groups became queued or ready again, by reason."""
        total = self.ended.came_back.copy()
        for life in self.groups.values():
            total += life.came_back
        return dict(total)

    def batches(self) -> dict[int, set[int]]:
        """Return the consumed groups of each step that was not undone: step -> group ids.

        Without those of the archive.
        """
        batches: dict[int, set[int]] = {}
        for group_id, life in self.groups.items():
            if life.state == CONSUMED:
                batches.setdefault(life.step, set()).add(group_id)
        return batches

    def to_archive(self) -> list[EndedGroup]:
        """Return the groups that have ended: dropped, or consumed by a step that is settled."""
        return [
            (group_id, life.step, life.dropped_for if life.state == DROPPED else "")
            for group_id, life in self.groups.items()
            if life.state == DROPPED or (life.state == CONSUMED and life.step <= self.settled)
        ]

    def archive(self, ended: Sequence[EndedGroup]) -> None:
        """Keep only totals of groups of `to_archive`."""
        lives = {group_id: self.groups.pop(group_id) for group_id, _, _ in ended}
        self.ended.count(lives)

    def state(self) -> dict[str, Any]:
        """Return all that further events are followed from, as JSON values."""
        ended = self.ended
        return {
            "groups": [[group_id, *life.row()] for group_id, life in self.groups.items()],
            "lineage": self.lineage.state(),
            "discarded": dict(self.discarded),
            "released": sorted(self.released),
            "imported": dict(self.imported),
            "ended": [
                ended.ids.ranges,
                ended.num_consumed,
                ended.num_leases,
                ended.num_before,
                dict(ended.dropped),
                dict(ended.came_back),
            ],
            **{name: getattr(self, name) for name in _NUMBERS},
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Audit:
        """Return the audit of which `state` was written."""
        ranges, num_consumed, num_leases, num_before, dropped, came_back = state["ended"]
        numbers = (num_consumed, num_leases, num_before)
        return cls(
            groups={group_id: GroupLife.of_row(row) for group_id, *row in state["groups"]},
            lineage=Lineage.restored(state["lineage"]),
            discarded=Counter(state["discarded"]),
            released=set(state["released"]),
            imported=Counter(state["imported"]),
            ended=Ended(IdRanges(ranges), *numbers, Counter(dropped), Counter(came_back)),
            **{name: state[name] for name in _NUMBERS},
        )

    def follow(self, seq: int, event: Event, *, max_staleness: float) -> None:
        """Apply an event; complain if it is not allowed. `max_staleness` infinity: no bound is checked."""
        if event.kind is EventKind.SNAPSHOT:
            _begin_with(self, seq, event)
            return
        self.num_events += 1
        if event.group_id < 0:
            _follow_run(self, seq, event)
        else:
            _follow_group(self, seq, event, max_staleness)

    def complain(self, line: str) -> None:
        """Record a problem."""
        self.num_problems += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(line)


def audit(events: Iterable[tuple[int, Event]], *, max_staleness: int) -> Audit:
    """Follow every group through (seq, event), in the order of `seq`."""
    found = Audit()
    for seq, event in events:
        found.follow(seq, event, max_staleness=max_staleness)
    return found


def _begin_with(found: Audit, seq: int, event: Event) -> None:
    """Take over what a snapshot knows of the events that it replaced."""
    is_first = not found.num_events
    state = json.loads(event.reason)
    known = Audit.of_state(state["audit"])
    for name in (*_NUMBERS, "groups", "lineage", "discarded", "released", "imported", "ended"):
        setattr(found, name, getattr(known, name))
    if not is_first:
        found.complain(f"event {seq}: a snapshot follows other events, which it should have replaced")
    if (mine := found.balance()) != (ledgers := balance_of(state["ledger"])):
        found.complain(f"event {seq}: the ledger's part of the snapshot has {ledgers}, the audit's {mine}")


def balance_of(ledger: Mapping[str, Any]) -> dict[str, int]:
    """Return what `Audit.balance` returns, of the ledger's part of a snapshot."""
    return {
        QUEUED: len(ledger["queued"]),
        "leased or ready": len(ledger["leased"]) + len(ledger["ready"]),
        CONSUMED: ledger["consumed"],
        DROPPED: sum(ledger["dropped"].values()),
        "discarded attempts": sum(ledger["discarded"].values()),
        "step": ledger["step"],
    }


def _follow_run(found: Audit, seq: int, event: Event) -> None:
    """Apply an event that concerns the whole run."""
    match event.kind:
        case EventKind.PUBLISHED:
            if event.version <= found.lineage.version:
                found.complain(
                    f"event {seq}: version {event.version} was published after version "
                    f"{found.lineage.version}"
                )
                return
            found.lineage.publish(event.version, event.step)
        case EventKind.ROLLED_BACK:
            found.num_rollbacks += 1
            if event.step < found.settled:
                found.complain(
                    f"event {seq}: step {event.step} was restored though step {found.settled} was settled"
                )
            found.lineage.roll_back(event.step)
            found.step = event.step
        case EventKind.RELEASED:
            found.released.add(event.owner)
        case EventKind.SETTLED:
            found.settled = event.step
        case EventKind.IMPORTED:
            _import(found, event)
        case _:
            found.complain(f"event {seq}: {event.kind} names no group")


def _import(found: Audit, event: Event) -> None:
    state = json.loads(event.reason)
    found.lineage = Lineage.restored(state["lineage"])
    found.lineage.roll_back(state["step"])
    found.step = found.settled = state["step"]
    found.discarded = Counter(state["discarded"])
    if num_lost := sum(num_members for _, _, num_members in state["open"]):
        found.discarded[OWNER_LOST] += num_lost
    found.groups = {group_id: GroupLife() for group_id, _, _ in state["open"]}
    found.groups |= {group["group_id"]: _imported(group) for group in state["ready"]}
    found.ended = Ended(num_before=found.ended.num_before + found.ended.num_groups)
    found.imported = Counter({CONSUMED: state["consumed"], DROPPED: sum(state["dropped"].values())})


def _imported(group: Mapping[str, Any]) -> GroupLife:
    versions, members = set(group["versions"]), len(group["members"])
    return GroupLife(READY, num_members=members, versions=versions, last_owner=group["owner"])


def _follow_group(found: Audit, seq: int, event: Event, max_staleness: float) -> None:
    if event.kind is EventKind.DISCARDED:
        found.discarded[event.reason] += 1
        return
    if event.group_id not in found.groups and event.group_id in found.ended.ids:
        found.complain(f"event {seq}: group {event.group_id} has ended and cannot be {event.kind}")
    life = found.groups.setdefault(event.group_id, GroupLife())
    allowed = {
        EventKind.LEASED: (QUEUED, LEASED),
        EventKind.ADDED: (LEASED,),
        EventKind.LEFT_OUT: (LEASED,),
        EventKind.QUEUED: (LEASED,),
        EventKind.DROPPED: (LEASED, READY, CONSUMED),
        EventKind.CONSUMED: (LEASED, READY),  # a leased group becomes ready without a separate event
        EventKind.RETURNED: (CONSUMED,),
        EventKind.REQUEUED: (CONSUMED,),
    }[event.kind]
    if life.state not in allowed:
        found.complain(f"event {seq}: group {event.group_id} is {life.state} and cannot be {event.kind}")
    match event.kind:
        case EventKind.LEASED:
            if event.owner in found.released:
                found.complain(
                    f"event {seq}: group {event.group_id} was leased to {event.owner}, which is dead"
                )
            life.state = LEASED
            life.players[event.owner] = set()
            life.num_leases += 1
        case EventKind.ADDED:
            life.players.setdefault(event.owner, set()).add((event.member, *event.versions))
            _delivered_last(life, event.owner)
        case EventKind.LEFT_OUT:
            _delivered_last(life, event.owner)
            found.discarded[event.reason] += 1
        case EventKind.QUEUED:
            found.discarded[event.reason] += len(life.players.pop(event.owner, ()))
            life.state = LEASED if life.players else QUEUED
            life.came_back[event.reason] += 1
        case EventKind.DROPPED:
            _discard_copies(found, life)
            _drop(found, life, event.reason)
        case EventKind.CONSUMED:
            _discard_copies(found, life)
            _consume(found, life, seq, event, max_staleness)
        case EventKind.RETURNED:
            life.state, life.step = READY, -1
            life.came_back[event.reason] += 1
        case EventKind.REQUEUED:
            found.discarded[event.reason] += life.num_members
            life.state, life.step, life.players = QUEUED, -1, {}
            life.came_back[event.reason] += 1


def _delivered_last(life: GroupLife, owner: str) -> None:
    """Take the group's content from the play of `owner`: whoever delivers or leaves out last completes it."""
    members = life.players.get(owner, set())
    life.last_owner = owner
    life.num_members = len(members)
    life.versions = {version for member in members for version in member[1:]}


def _discard_copies(found: Audit, life: GroupLife) -> None:
    """Count the members of unfinished copies of a group that another owner completed.

    A group that several owners play is never dropped, so one that is dropped or taken is complete.
    """
    for owner in [owner for owner in life.players if owner != life.last_owner]:
        if members := life.players.pop(owner):
            found.discarded[OUTRUN] += len(members)


def _drop(found: Audit, life: GroupLife, reason: str) -> None:
    step = life.step if life.state == CONSUMED else None
    life.state, life.dropped_for, life.step = DROPPED, reason, -1
    is_of_step = (other.state == CONSUMED and other.step == step for other in found.groups.values())
    if step is not None and not any(is_of_step):  # the whole batch was rejected: nothing was learned
        found.step = step - 1


def _consume(found: Audit, life: GroupLife, seq: int, event: Event, max_staleness: float) -> None:
    if event.step not in (found.step, found.step + 1):
        found.complain(
            f"event {seq}: group {event.group_id} was taken for step {event.step} after step {found.step}"
        )
    lag = max(map(found.lineage.lag, life.versions), default=0)
    if lag > max_staleness:
        found.complain(
            f"event {seq}: group {event.group_id} was taken with a token {lag} versions old; the bound is "
            f"{max_staleness}"
        )
    found.max_lag = max(found.max_lag, lag)
    found.num_taken += 1
    found.step = event.step
    life.state, life.step = CONSUMED, event.step
