"""Diagnosis of a stuck run: asks all its parts at once what they wait for. No answer is a finding, too."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayError

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.controller.phases import Phases
from agentrl.fleet.rollouts import RolloutFleet
from agentrl.fleet.servers import ServerFleet
from agentrl.rollout.scopes import LiveScopes, stack_of
from agentrl.rollout.server_loads import ask_loads
from agentrl.rollout.worker import RolloutWorker
from agentrl.sglang.client import SGLangClient
from agentrl.tracking.watchdog import KEPT_SCOPES, SLICE_S
from agentrl.types import BufferCounts, HeldLease
from agentrl.workers.actors import Actor, translate
from agentrl.workers.workers import Workers

BUFFER = "the replay buffer"
SHOWN_LEASES = 10


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a run that may be stuck.

    ranks: returns the current ranks of all roles; a recovery replaces them.
    driver: the thread that makes the steps.
    """

    buffer: Actor[ReplayBuffer]
    servers: ServerFleet
    rollouts: RolloutFleet
    ranks: Callable[[], Sequence[Workers[Any]]]
    phases: Phases
    driver: threading.Thread


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Replaces a missing answer; `why` is one line."""

    why: str


class Asker:
    """Asks actors and servers, with a timeout of `answer_s` each. Stops waiting once `stopping` is set."""

    def __init__(self, *, answer_s: float, stopping: threading.Event) -> None:
        self._answer_s = answer_s
        self._stopping = stopping

    def answers(self, asked: Mapping[str, ObjectRef]) -> dict[str, Any]:
        """Wait for all results at once; return each answer, or a NoAnswer."""
        pending, deadline = list(asked.values()), time.monotonic() + self._answer_s
        while pending and not self._stopping.is_set() and time.monotonic() < deadline:
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=SLICE_S)
        return {who: NoAnswer(f"{who} does not answer") if ref in pending else self._answer(who, ref) for who, ref in asked.items()}

    def _answer(self, who: str, ref: ObjectRef) -> Any:
        try:
            return ray.get(ref, timeout=self._answer_s)
        except RayError as error:
            return NoAnswer(str(translate(error, who=who, timeout_s=self._answer_s)))

    def loads(self, clients: Sequence[SGLangClient]) -> dict[str, str]:
        """Return the load that each server reports, as text, by URL."""
        return ask_loads(clients, answer_s=self._answer_s, stopping=self._stopping)


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far the run is. A field is None if nobody answered.

    since_add_s: seconds since a trajectory reached the buffer.
    num_finished: attempts that ended, those of validations included.
    """

    since_add_s: float | None
    num_finished: float | None


def look_at_progress(parts: Parts, asker: Asker) -> RunProgress:
    """Ask the buffer and the rollout actors for their progress."""
    asked = {name: actor.begin(RolloutWorker.stats) for name, actor in parts.rollouts.actors.items()}
    said = asker.answers({BUFFER: parts.buffer.begin(ReplayBuffer.stats), **asked})
    buffer = said.pop(BUFFER)
    # A counter is missing until its first count.
    finished = [stats.get("finished", 0.0) for stats in said.values() if not isinstance(stats, NoAnswer)]
    return RunProgress(None if isinstance(buffer, NoAnswer) else buffer["since_last_add_s"], sum(finished) if finished else None)


@dataclass(frozen=True, slots=True)
class RunFindings:
    """The answers of all parts; NoAnswer where one is missing."""

    controller: Sequence[str]
    counts: BufferCounts | NoAnswer
    since_add_s: float | None
    leases: Sequence[HeldLease] | NoAnswer
    servers: Sequence[str]
    learner: Sequence[str]
    rollouts: Mapping[str, LiveScopes | NoAnswer]

    def lines(self, *, max_scopes: int | None = None) -> Iterator[str]:
        """Yield the findings as lines of text.

        max_scopes: number of attempts per actor that are shown in full; None: all, and trio's task tree.
        """
        yield from self.controller
        yield from self._ledger_lines()
        yield "servers:"
        yield from (f"  {line}" for line in self.servers)
        yield "learner:"
        yield from (f"  {line}" for line in self.learner)
        for owner, scopes in self.rollouts.items():
            if isinstance(scopes, NoAnswer):
                yield f"rollout actor {scopes.why}"
            else:
                yield f"rollout actor {owner}:"
                yield from (f"  {line}" for line in (scopes if max_scopes is None else scopes.shortened(max_scopes)).lines())

    def _ledger_lines(self) -> Iterator[str]:
        if isinstance(self.counts, NoAnswer):
            yield self.counts.why
        else:
            since = "" if self.since_add_s is None else f"; the last trajectory came {self.since_add_s:.0f} s ago"
            yield f"replay buffer: {self.counts}{since}"
        if not isinstance(self.leases, NoAnswer):
            for lease in self.leases[:SHOWN_LEASES]:
                yield f"  group {lease.group_id} is leased to {lease.owner} for {lease.age_s:.0f} s; {lease.num_members} members are there"
            if len(self.leases) > SHOWN_LEASES:
                yield f"  and {len(self.leases) - SHOWN_LEASES} more leases, none of them older"


def find(parts: Parts, asker: Asker) -> RunFindings:
    """Ask every part of the run what it waits for."""
    controller = list(_of_controller(parts))  # first: its state may change while the others answer
    buffer = parts.buffer
    asked = {owner: actor.begin(RolloutWorker.scopes, KEPT_SCOPES) for owner, actor in parts.rollouts.actors.items()}
    own = {
        "counts": buffer.begin(ReplayBuffer.counts),
        "stats": buffer.begin(ReplayBuffer.stats),
        "leases": buffer.begin(ReplayBuffer.leases),
    }
    said = asker.answers({**own, **asked})
    counts, stats, leases = (NoAnswer(f"{BUFFER} does not answer") if isinstance(said[n], NoAnswer) else said[n] for n in own)
    learner = [line for workers in parts.ranks() for line in workers.unanswered()]
    return RunFindings(
        controller,
        counts,
        None if isinstance(stats, NoAnswer) else stats["since_last_add_s"],
        leases,
        _of_servers(parts.servers, asker),
        learner or ["no call is under way"],
        {owner: said[owner] for owner in asked},
    )


def _of_controller(parts: Parts) -> Iterator[str]:
    phase, since = parts.phases.current
    doing = "between two phases" if phase is None else f"in phase {phase!r}"
    yield f"controller: {doing} for {time.monotonic() - since:.0f} s, in {' < '.join(stack_of(parts.driver)) or 'no thread any more'}"


def _of_servers(servers: ServerFleet, asker: Asker) -> list[str]:
    lines = servers.lines
    loads = asker.loads(servers.clients([line.url for line in lines if line.url]))
    return [f"{line.name} {line.url} {line.state}, {line.restarts} restarts: {loads.get(line.url, 'not asked')}" for line in lines]
