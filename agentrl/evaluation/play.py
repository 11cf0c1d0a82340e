"""Play the missing attempts of an evaluation.

Infrastructure failures are retried, and each attempt is stored when it finishes.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import trio

from agentrl.errors import InfrastructureError
from agentrl.evaluation.concurrency import Concurrency
from agentrl.evaluation.data_sets import EvaluationProblem
from agentrl.evaluation.model_place import Servers
from agentrl.evaluation.store import AttemptStore
from agentrl.plugins.blame import failure_of
from agentrl.rollout.recorder import Attempt
from agentrl.rollout.sampling import Sampling
from agentrl.rollout.scopes import Scope
from agentrl.tracking.attempts import FailedAttempt
from agentrl.types import SCORED_OUTCOMES, Outcome, Task, Trajectory

MAX_FAILURES_IN_A_ROW = 64
"""Consecutive attempts that fail, each after all its retries,
before the evaluation stops: the failure is not transient.
"""
RETRY_PAUSE_S = 1.0
"""Pause before the first retry; doubled for each further one."""
SERVERS_INTERVAL_S = 1.0
"""Seconds between polls of the servers' URLs."""
_TROUBLES = {Outcome.MODEL_ERROR: "overload", Outcome.TIMEOUT: "timeout"}


class Plays(Protocol):
    """Plays single attempts: `agentrl.rollout.player.Player`."""

    async def play(self, attempt: Attempt, sampling: Sampling) -> Trajectory: ...


class Compares(Protocol):
    """Scores attempts in comparison with their group: `agentrl.rollout.scoring.Scorer`."""

    def has_group_rewards(self, task: Task) -> bool: ...

    async def score_group(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Trajectory]: ...


class Routes(Protocol):
    """Routes requests to the servers: `agentrl.rollout.router.Router`."""

    def set_servers(self, urls: Sequence[str], *, version: int) -> None: ...

    async def watch(self) -> None: ...


@dataclass(eq=False)
class _Group:
    """The members of a problem that are played. If a reward compares them, they are stored together."""

    problem: EvaluationProblem
    members: tuple[int, ...]
    compares: bool
    ended: list[Trajectory] = field(default_factory=list)


@dataclass
class Counts:
    """Totals so far. `retries`: counted by the outcome of the failed try."""

    played: int = 0
    failed: int = 0
    retries: Counter[str] = field(default_factory=Counter)


class AttemptPlayer:
    """Plays problems concurrently, as many at once as the servers can handle.

    `on_finished` is called with each finished attempt, after it is stored. `on_failed` is called with each
    failed try, and with each tool failure after which a try continued.
    """

    def __init__(
        self,
        player: Plays,
        scorer: Compares,
        store: AttemptStore,
        concurrency: Concurrency,
        *,
        sampling: Sampling,
        max_retries: int,
        on_finished: Callable[[Trajectory], None],
        on_failed: Callable[[FailedAttempt], None],
    ) -> None:
        self._player = player
        self._scorer = scorer
        self._store = store
        self._concurrency = concurrency
        self._sampling = sampling
        self._max_retries = max_retries
        self._on_finished = on_finished
        self._on_failed = on_failed
        self._failures_in_a_row = 0
        self._last_end = time.monotonic()
        self.counts = Counts()
        self.scopes = Scope()  # tree of everything that currently runs

    @property
    def silent_s(self) -> float:
        """Seconds since the last try ended; before the first: since construction."""
        return time.monotonic() - self._last_end

    async def run(self, problems: Iterable[EvaluationProblem], servers: Servers, router: Routes) -> None:
        """Play the attempts that the store does not have.

        Raises:
            ServerError: a server failed permanently.
            InfrastructureError: too many consecutive attempts failed.
        """
        # Shutdown order: the attempts end, `send` closes, `_keep` stores what is queued and ends, and only
        # then are the servers no longer watched. An error in any task cancels all of them.
        send, receive = trio.open_memory_channel[tuple[str, Trajectory]](float("inf"))
        async with trio.open_nursery() as watching:
            watching.start_soon(router.watch)
            await watching.start(self._follow, servers, router)
            async with trio.open_nursery() as keeping:
                keeping.start_soon(self._keep, receive)
                async with send, trio.open_nursery() as nursery:
                    await self._start_all(problems, send, nursery)
            watching.cancel_scope.cancel()

    async def _start_all(self, problems: Iterable[EvaluationProblem], out: trio.MemorySendChannel, nursery: trio.Nursery) -> None:
        """Consumes problems; waits for a free slot; unblocked by attempts that end.

        Produces a task per attempt.
        """
        for group in filter(None, map(self._missing, problems)):
            for member in group.members:
                attempt = Attempt(group.problem.number, member, group.problem.task)
                began_in = await self._concurrency.begin(attempt.key)
                nursery.start_soon(self._play, attempt, group, began_in, out)

    def _missing(self, problem: EvaluationProblem) -> _Group | None:
        """Return the members of a problem to play: all, if any is missing and a reward compares them."""
        members = tuple(member for member, key in enumerate(problem.keys) if not self._store.has(key))
        if not members:
            return None
        compares = self._scorer.has_group_rewards(problem.task)
        return _Group(problem, tuple(range(len(problem.keys))) if compares else members, compares)

    async def _play(self, attempt: Attempt, group: _Group, began_in: int, out: trio.MemorySendChannel) -> None:
        try:
            trajectory = await self._play_until_it_counts(attempt, began_in)
        finally:
            self._concurrency.end(attempt.key)
        group.ended.append(trajectory)
        if not group.compares:
            await out.send((group.problem.keys[attempt.member], trajectory))
        elif len(group.ended) == len(group.members):
            for scored in await self._compared(group):
                await out.send((group.problem.keys[scored.member], scored))

    async def _play_until_it_counts(self, attempt: Attempt, began_in: int) -> Trajectory:
        """Return the first try that can be scored, or else the last try."""
        for further in itertools.count():
            trajectory = await self._try(Attempt(attempt.group_id, attempt.member, attempt.task))
            if trajectory.outcome in SCORED_OUTCOMES:
                self._concurrency.went_well(began_in, trajectory.metrics.get("generate_s", 0.0), trajectory.num_action_tokens)
                self._failures_in_a_row = 0
                break
            if (reason := _TROUBLES.get(trajectory.outcome)) is not None:
                self._concurrency.trouble(began_in, reason)
                began_in = self._concurrency.round
            is_last = further == self._max_retries
            self._on_failed(FailedAttempt.of(trajectory, became="not_scored" if is_last else "retried", version=0))
            if is_last:
                self._refuse_endless_failure(trajectory)
                break
            self.counts.retries[trajectory.outcome.value] += 1
            with self.scopes.open(f"problem {attempt.group_id} member {attempt.member}: pause before another try"):
                await trio.sleep(RETRY_PAUSE_S * 2**further)
        return trajectory

    async def _try(self, attempt: Attempt) -> Trajectory:
        name = f"problem {attempt.group_id} member {attempt.member} ({attempt.task.agent_name})"
        with attempt.scope.attach(self.scopes, name, doing="its agent loop", key=attempt.key):
            trajectory = await self._player.play(attempt, self._sampling)
        for failure in attempt.survived:
            record = trajectory.replace(failure=failure, outcome=Outcome.TOOL_ERROR)
            self._on_failed(FailedAttempt.of(record, became="went_on", version=0))
        self._last_end = time.monotonic()
        return trajectory

    async def _compared(self, group: _Group) -> list[Trajectory]:
        """Return the members with the rewards that compare them. Failed members are unchanged."""
        scored = sorted((t for t in group.ended if t.outcome in SCORED_OUTCOMES), key=lambda t: t.member)
        failed = [t for t in group.ended if t.outcome not in SCORED_OUTCOMES]
        if not scored:
            return failed
        try:
            with self.scopes.open(f"problem {group.problem.number}: rewards that compare its members"):
                return [*await self._scorer.score_group(group.problem.task, scored), *failed]
        except Exception as error:  # noqa: BLE001 - boundary of one group: its reward raised
            unscored = [t.replace(outcome=Outcome.REWARD_ERROR, failure=failure_of(error), rewards=()) for t in scored]
            for trajectory in unscored:
                self._on_failed(FailedAttempt.of(trajectory, became="not_scored", version=0))
            return [*unscored, *failed]

    def _refuse_endless_failure(self, trajectory: Trajectory) -> None:
        self._failures_in_a_row += 1
        if self._failures_in_a_row == MAX_FAILURES_IN_A_ROW:
            raise InfrastructureError(
                f"{MAX_FAILURES_IN_A_ROW} attempts failed one after the other, the last ({trajectory.outcome.value}): "
                f"{trajectory.failure}; what was finished is kept, and the same command goes on from there"
            )

    async def _keep(self, receive: trio.MemoryReceiveChannel[tuple[str, Trajectory]]) -> None:
        """Consumes finished attempts; unblocked by each; stores all that wait, in one batch."""
        async for first in receive:
            waiting = [first]
            while True:
                try:
                    waiting.append(receive.receive_nowait())
                except (trio.WouldBlock, trio.EndOfChannel):
                    break
            with self.scopes.open(f"keep {len(waiting)} attempts"):
                await trio.to_thread.run_sync(self._store.add, waiting)
            for _, trajectory in waiting:
                self.counts.played += 1
                self.counts.failed += trajectory.outcome not in SCORED_OUTCOMES
                self._on_finished(trajectory)

    async def _follow(self, servers: Servers, router: Routes, *, task_status: trio.TaskStatus = trio.TASK_STATUS_IGNORED) -> None:
        """Consumes the servers' URLs; unblocked by time; updates the router's servers."""
        known: Sequence[str] = ()
        while True:
            urls = servers.urls()
            if list(urls) != list(known):
                router.set_servers(urls, version=0)
                known = list(urls)
            task_status.started()
            task_status = trio.TASK_STATUS_IGNORED
            await trio.sleep(SERVERS_INTERVAL_S)
