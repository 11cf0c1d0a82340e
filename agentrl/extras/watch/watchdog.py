"""The watchdog of a training run: how it measures progress, and what it asks all parts when there is none.

Progress is a trajectory that reached the buffer, an attempt that ended (of a validation, too), or the begin
or end of a phase: a batch, an update, a publish, a checkpoint. No answer is a finding, too. See
agentrl.tracking.watchdog.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray import ObjectRef
from ray.exceptions import RayError

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.cluster.actors import Actor, translate
from agentrl.cluster.frozen_servers import FrozenFleet
from agentrl.cluster.rollouts import RolloutFleet
from agentrl.cluster.servers import ServerFleet
from agentrl.cluster.workers import Workers
from agentrl.config.schema import Config
from agentrl.controller.listeners import RunListener
from agentrl.controller.run_dir import RunDir
from agentrl.rollout.scopes import stack_of
from agentrl.rollout.worker import RolloutWorker
from agentrl.servers.client import SGLangClient
from agentrl.servers.server_loads import ask_loads
from agentrl.tracking.metrics import PhaseTimer
from agentrl.tracking.watchdog import ANSWER_S, KEPT_SCOPES, SLICE_S, Findings, Watchdog
from agentrl.types import BufferCounts, HeldLease

if TYPE_CHECKING:
    from agentrl.controller.run import Run

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
    frozen: FrozenFleet
    rollouts: RolloutFleet
    ranks: Callable[[], Sequence[Workers[Any]]]
    phases: PhaseTimer
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
        return {
            who: NoAnswer(f"{who} does not answer") if ref in pending else self._answer(who, ref)
            for who, ref in asked.items()
        }

    def _answer(self, who: str, ref: ObjectRef) -> Any:
        try:
            return ray.get(ref, timeout=self._answer_s)
        except RayError as error:
            return NoAnswer(str(translate(error, who=who, timeout_s=self._answer_s)))

    def loads(self, clients: Sequence[SGLangClient]) -> dict[str, str]:
        """Return the load that each server reports, as text, by URL."""
        return ask_loads(clients, answer_s=self._answer_s, stopping=self._stopping)


def look_at_progress(parts: Parts, asker: Asker) -> tuple[float | None, float | None]:
    """Ask the buffer and the rollout actors for their progress.

    Returns:
        Seconds since a trajectory reached the buffer, and the number of attempts that ended, those of
        validations included. None where nobody answered.
    """
    asked = {name: actor.begin(RolloutWorker.stats) for name, actor in parts.rollouts.actors.items()}
    said = asker.answers({BUFFER: parts.buffer.begin(ReplayBuffer.stats), **asked})
    buffer = said.pop(BUFFER)
    # A counter is missing until its first count.
    finished = [stats.get("finished", 0.0) for stats in said.values() if not isinstance(stats, NoAnswer)]
    since_add_s = None if isinstance(buffer, NoAnswer) else buffer["since_last_add_s"]
    return since_add_s, sum(finished) if finished else None


def find(parts: Parts, asker: Asker) -> Findings:
    """Ask every part of the run what it waits for."""
    controller = _of_controller(parts)  # first: its state may change while the others answer
    buffer = parts.buffer
    playing = {
        f"rollout actor {owner}": actor.begin(RolloutWorker.scopes, KEPT_SCOPES)
        for owner, actor in parts.rollouts.actors.items()
    }
    own = [
        buffer.begin(ReplayBuffer.counts),
        buffer.begin(ReplayBuffer.stats),
        buffer.begin(ReplayBuffer.leases),
    ]
    said = asker.answers({**dict(zip(("counts", "stats", "leases"), own, strict=True)), **playing})
    facts = [controller, *_of_buffer(said["counts"], said["stats"], said["leases"]), "servers:"]
    facts += [f"  {line}" for line in _of_servers(parts.servers, parts.frozen, asker)]
    learner = [line for workers in parts.ranks() for line in workers.unanswered()]
    facts += ["learner:", *(f"  {line}" for line in learner or ["no call in progress"])]
    found = {title: said[title] for title in playing}
    return Findings(
        facts,
        {title: scopes.why if isinstance(scopes, NoAnswer) else scopes for title, scopes in found.items()},
    )


def _of_buffer(
    counts: BufferCounts | NoAnswer,
    stats: Mapping[str, float] | NoAnswer,
    leases: Sequence[HeldLease] | NoAnswer,
) -> Iterator[str]:
    if isinstance(counts, NoAnswer):
        yield f"{BUFFER} does not answer"
    else:
        since = (
            "" if isinstance(stats, NoAnswer) else f"; last trajectory {stats['since_last_add_s']:.0f} s ago"
        )
        yield f"replay buffer: {counts}{since}"
    if not isinstance(leases, NoAnswer):
        for lease in leases[:SHOWN_LEASES]:
            yield (
                f"  group {lease.group_id} leased to {lease.owner} for {lease.age_s:.0f} s; "
                f"{lease.num_members} members finished"
            )
        if len(leases) > SHOWN_LEASES:
            yield f"  and {len(leases) - SHOWN_LEASES} more leases, all newer"


def _of_controller(parts: Parts) -> str:
    phase, since = parts.phases.current
    doing = "between two phases" if phase is None else f"in phase {phase!r}"
    return (
        f"controller: {doing} for {time.monotonic() - since:.0f} s, in "
        f"{' < '.join(stack_of(parts.driver)) or 'no thread'}"
    )


def _of_servers(servers: ServerFleet, frozen: FrozenFleet, asker: Asker) -> list[str]:
    lines = servers.lines
    loads = asker.loads(servers.clients([line.url for line in lines if line.url]))
    return [
        f"{line.name} {line.url} {line.state}, {line.restarts} restarts: {loads.get(line.url, 'not asked')}"
        for line in lines
    ] + [f"{line.name} {line.url} {line.state}, {line.restarts} restarts" for line in frozen.lines]


class WatchedRun:
    """A running run, as its watchdog sees it. `answer_s`: timeout of each part's answer."""

    key = "trainer.watchdog_s"
    progress = "trajectory, batch, update or publish"

    def __init__(self, parts: Parts, *, answer_s: float = ANSWER_S) -> None:
        self.stopping = threading.Event()
        self._parts = parts
        self._asker = Asker(answer_s=answer_s, stopping=self.stopping)
        self._last_progress = time.monotonic()
        self._num_finished: float | None = None

    def measure_silence(self, limit_s: float) -> float:
        """Return the seconds since the last progress.

        Buffer and actors are asked only after the controller has been silent for half of the limit.
        """
        _, since = self._parts.phases.current
        silent_s = time.monotonic() - max(since, self._last_progress)
        if silent_s < limit_s / 2:
            return silent_s
        since_add_s, num_finished = look_at_progress(self._parts, self._asker)
        if num_finished is not None:
            if self._num_finished is not None and num_finished > self._num_finished:
                self._last_progress = time.monotonic()
            self._num_finished = num_finished
        silent_s = time.monotonic() - max(since, self._last_progress)
        return silent_s if since_add_s is None else min(silent_s, since_add_s)

    def find(self) -> Findings:
        return find(self._parts, self._asker)


class WatchdogListener(RunListener):
    """Watches a run from its start to its end. The reports show the stack of the thread that starts it."""

    def __init__(self, config: Config, run_dir: RunDir) -> None:
        self._config = config
        self._folder = run_dir.root / "watchdog"
        self._watching = ExitStack()

    def on_start(self, run: Run) -> None:
        silence_s = self._config.trainer.watchdog_s
        assert silence_s is not None
        parts = Parts(
            run.buffer,
            run.servers,
            run.frozen,
            run.rollouts,
            lambda: [*run.roles.ranks],
            run.timer,
            threading.current_thread(),
        )
        watched, say = WatchedRun(parts), run.observer.say
        watchdog = Watchdog(watched, silence_s=silence_s, folder=self._folder, say=say)
        self._watching.enter_context(watchdog)

    def on_end(self) -> None:
        self._watching.close()


def watchdog(config: Config, run_dir: RunDir) -> RunListener | None:
    return None if config.trainer.watchdog_s is None else WatchdogListener(config, run_dir)
