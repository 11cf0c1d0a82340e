"""The audit of a journal: follows every group through its events, independently of the ledger's own code.

The audit makes no decisions. It only checks that each transition of a group is allowed, so a bug in the
ledger becomes visible. Its totals are compared with the counts that the run itself reported.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from agentrl.buffer.events import Event, EventKind
from agentrl.buffer.lineage import Lineage

QUEUED, LEASED, READY, CONSUMED, DROPPED = "queued", "leased", "ready", "consumed", "dropped"
MAX_PROBLEMS = 20


@dataclass(slots=True)
class GroupLife:
    """State, owners and history of one group."""

    state: str = QUEUED
    players: dict[str, set[tuple[int, ...]]] = field(
        default_factory=dict
    )  # owner -> (member, *versions) of each
    num_members: int = 0  # members delivered by the owner that delivered last
    versions: set[int] = field(default_factory=set)  # of those members' action tokens
    step: int = -1
    dropped_for: str = ""
    num_leases: int = 0
    came_back: Counter[str] = field(
        default_factory=Counter
    )  # reason -> times it became queued or ready again


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
    problems: list[str] = field(default_factory=list)
    num_problems: int = 0

    @property
    def is_balanced(self) -> bool:
        return self.num_problems == 0

    def counts(self) -> dict[str, int]:
        """Return the number of groups by state, including those of an imported checkpoint."""
        states = Counter(life.state for life in self.groups.values()) + self.imported
        return {state: states[state] for state in (QUEUED, LEASED, READY, CONSUMED, DROPPED)}

    def dropped(self) -> dict[str, int]:
        """Return the number of dropped groups by reason."""
        return dict(Counter(life.dropped_for for life in self.groups.values() if life.state == DROPPED))

    def came_back(self) -> dict[str, int]:
        """Return how often groups became queued or ready again, by reason."""
        total: Counter[str] = Counter()
        for life in self.groups.values():
            total += life.came_back
        return dict(total)

    def batches(self) -> dict[int, set[int]]:
        """Return the consumed groups of each step that was not undone: step -> group ids."""
        batches: dict[int, set[int]] = {}
        for group_id, life in self.groups.items():
            if life.state == CONSUMED:
                batches.setdefault(life.step, set()).add(group_id)
        return batches

    def complain(self, line: str) -> None:
        """Record a problem."""
        self.num_problems += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(line)


def audit(events: Iterable[tuple[int, Event]], *, max_staleness: int) -> Audit:
    """Follow every group through (seq, event), in the order of `seq`."""
    found = Audit()
    for seq, event in events:
        found.num_events += 1
        if event.group_id < 0:
            _follow_run(found, seq, event)
        else:
            _follow_group(found, seq, event, max_staleness)
    return found


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
    found.discarded.update(state["discarded"])
    found.groups = {group_id: GroupLife() for group_id, _, _ in state["open"]}
    found.groups |= {
        group["group_id"]: GroupLife(READY, versions=set(group["versions"])) for group in state["ready"]
    }
    found.imported = Counter({CONSUMED: state["consumed"], DROPPED: sum(state["dropped"].values())})


def _follow_group(found: Audit, seq: int, event: Event, max_staleness: int) -> None:
    if event.kind is EventKind.DISCARDED:
        found.discarded[event.reason] += 1
        return
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
            life.num_members = len(life.players[event.owner])
            life.versions = {v for member in life.players[event.owner] for v in member[1:]}
        case EventKind.LEFT_OUT:
            found.discarded[event.reason] += 1
        case EventKind.QUEUED:
            found.discarded[event.reason] += len(life.players.pop(event.owner, ()))
            life.state = LEASED if life.players else QUEUED
            life.came_back[event.reason] += 1
        case EventKind.DROPPED:
            life.state, life.dropped_for, life.step = DROPPED, event.reason, -1
        case EventKind.CONSUMED:
            _consume(found, life, seq, event, max_staleness)
        case EventKind.RETURNED:
            life.state, life.step = READY, -1
            life.came_back[event.reason] += 1
        case EventKind.REQUEUED:
            found.discarded[event.reason] += life.num_members
            life.state, life.step, life.players = QUEUED, -1, {}
            life.came_back[event.reason] += 1


def _consume(found: Audit, life: GroupLife, seq: int, event: Event, max_staleness: int) -> None:
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
