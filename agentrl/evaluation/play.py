"""Play the missing attempts of an evaluation.

Failures are retried, and each attempt is stored when it finishes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import trio

from agentrl.errors import InfrastructureError
from agentrl.evaluation.concurrency import Concurrency
from agentrl.evaluation.data_sets import EvaluationProblem
from agentrl.evaluation.model_place import Servers
from agentrl.evaluation.store import AttemptStore
from agentrl.evaluation.time_left import TimeLeft
from agentrl.rollout.group_player import AttemptPlayer, GroupPlayer, GroupScorer, PlayLog
from agentrl.rollout.outcomes import OutcomeTable, Retry
from agentrl.rollout.recorder import Attempt
from agentrl.rollout.sampling import Sampling, TurnSource
from agentrl.rollout.scopes import Scope
from agentrl.rollout.shipment import Shipment, in_batches
from agentrl.rollout.tracing import AttemptTracing
from agentrl.tracking.attempts import Became, FailedAttempt
from agentrl.types import SCORED_OUTCOMES, Lease, Outcome, Trajectory

MAX_FAILURES_IN_A_ROW = 64
"""Consecutive attempts that fail, each after all its retries,
before the evaluation stops: the failure is not transient.
"""
SERVERS_INTERVAL_S = 1.0
"""Seconds between polls of the servers' URLs."""
_TROUBLES = {Outcome.MODEL_ERROR: "overload", Outcome.TIMEOUT: "timeout"}


@dataclass
class Counts:
    """Totals so far. `retries`: counted by the outcome of the failed try."""

    played: int = 0
    failed: int = 0
    retries: Counter[str] = field(default_factory=Counter)


class ProblemPlayer:
    """Plays problems concurrently, as many attempts at once as the servers can handle.

    `on_finished` is called with each finished attempt, after it is stored. `on_failed` is called with each
    failed try, and with each tool failure after which a try continued. `tracer`: makes traces; None: none.
    """

    def __init__(
        self,
        player: AttemptPlayer,
        scorer: GroupScorer,
        store: AttemptStore,
        concurrency: Concurrency,
        time_left: TimeLeft,
        *,
        sampling: Sampling,
        max_retries: int,
        on_finished: Callable[[Trajectory], None],
        on_failed: Callable[[FailedAttempt], None],
        tracer: AttemptTracing | None = None,
    ) -> None:
        self._scorer = scorer
        self._store = store
        self._sampling = sampling
        self._on_finished = on_finished
        self._log = _EvaluationLog(concurrency, time_left, on_failed)
        self.counts = self._log.counts
        self.scopes = Scope()  # tree of everything that currently runs
        log: PlayLog = self._log if tracer is None else tracer.log(self._log, "evaluation")
        self._groups = GroupPlayer(
            player,
            scorer,
            OutcomeTable.keeping(max_retries=max_retries),
            log,
            admission=self._log,
            scopes=self.scopes,
            unit="problem",
            tracing=None if tracer is None else tracer.of("evaluation"),
        )

    @property
    def silent_s(self) -> float:
        """Seconds since the last try ended; before the first: since construction."""
        return time.monotonic() - self._log.last_end

    async def run(self, problems: Iterable[EvaluationProblem], servers: Servers, turns: TurnSource) -> None:
        """Play the attempts that the store does not have.

        Raises:
            ServerError: a server failed permanently.
            InfrastructureError: too many consecutive attempts failed.
        """
        # Shutdown order: the attempts end, `send` closes, `_keep` stores what is queued and ends, and only
        # then are the servers no longer watched. An error in any task cancels all of them.
        send, receive = trio.open_memory_channel[tuple[str, Trajectory]](float("inf"))
        async with trio.open_nursery() as watching:
            watching.start_soon(turns.watch)
            await watching.start(self._follow, servers, turns)
            async with trio.open_nursery() as keeping:
                keeping.start_soon(self._keep, receive)
                async with send, trio.open_nursery() as nursery:
                    for problem in problems:
                        if members := self._missing(problem):
                            lease = Lease(problem.number, problem.task, len(problem.keys), version=0)
                            deliver = partial(self._deliver, problem.keys, send)
                            await nursery.start(
                                partial(self._groups.play, lease, self._sampling, deliver, members=members)
                            )
            watching.cancel_scope.cancel()

    def _missing(self, problem: EvaluationProblem) -> Sequence[int]:
        """Return the members of a problem to play: all, if any is missing and a reward compares them."""
        missing = [member for member, key in enumerate(problem.keys) if not self._store.has(key)]
        return (
            range(len(problem.keys)) if missing and self._scorer.has_group_rewards(problem.task) else missing
        )

    @staticmethod
    async def _deliver(
        keys: Sequence[str], out: trio.MemorySendChannel[tuple[str, Trajectory]], played: Shipment
    ) -> None:
        assert isinstance(played, Trajectory), "failures are kept"
        await out.send((keys[played.member], played))

    async def _keep(self, receive: trio.MemoryReceiveChannel[tuple[str, Trajectory]]) -> None:
        """Consumes finished attempts; unblocked by each; stores all that wait, in one batch."""
        async for waiting in in_batches(receive):
            with self.scopes.open(f"keep {len(waiting)} attempts"):
                await trio.to_thread.run_sync(self._store.add, waiting)
            for _, trajectory in waiting:
                self.counts.played += 1
                self.counts.failed += trajectory.outcome not in SCORED_OUTCOMES
                self._on_finished(trajectory)

    async def _follow(
        self,
        servers: Servers,
        turns: TurnSource,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Consumes the servers' URLs; unblocked by time; updates the servers of `turns`."""
        known: Sequence[str] = ()
        while True:
            urls = servers.urls()
            if list(urls) != list(known):
                turns.set_servers(urls, version=0)
                known = list(urls)
            task_status.started()
            task_status = trio.TASK_STATUS_IGNORED
            await trio.sleep(SERVERS_INTERVAL_S)


class _EvaluationLog:
    """Reports failures, and admits as many attempts at once as their ends allow."""

    def __init__(
        self, concurrency: Concurrency, time_left: TimeLeft, on_failed: Callable[[FailedAttempt], None]
    ) -> None:
        self._concurrency = concurrency
        self._time_left = time_left
        self._on_failed = on_failed
        self._rounds: dict[str, int] = {}  # attempt key -> round of the concurrency limit in which it began
        self._failures_in_a_row = 0
        self.counts = Counts()
        self.last_end = time.monotonic()

    async def begin(self, attempt: Attempt) -> None:
        self._rounds[attempt.key] = await self._concurrency.begin(attempt.key)
        self._time_left.began(attempt.key)

    def end(self, attempt: Attempt) -> None:
        del self._rounds[attempt.key]
        self._concurrency.end(attempt.key)

    def slot(self, attempt: Attempt) -> AbstractAsyncContextManager[None]:
        return nullcontext()  # of a member that was admitted, one attempt after another is played

    def tried(self, lease: Lease, attempt: Attempt, trajectory: Trajectory, retry: Retry | None) -> None:
        self.last_end = time.monotonic()
        if retry is None:
            self._time_left.ended(attempt.key, trajectory.num_action_tokens)
        for failure in attempt.survived:
            self._on_failed(FailedAttempt.survived(trajectory, failure, version=lease.version))
        began_in = self._rounds[attempt.key]
        if trajectory.outcome in SCORED_OUTCOMES:
            self._concurrency.went_well(
                began_in, trajectory.metrics.get("generate_s", 0.0), trajectory.num_action_tokens
            )
            self._failures_in_a_row = 0
            return
        if (reason := _TROUBLES.get(trajectory.outcome)) is not None:
            self._concurrency.trouble(began_in, reason)
            self._rounds[attempt.key] = self._concurrency.round
        if retry is None:
            self._failures_in_a_row += 1
        else:
            self.ended(lease, trajectory, retry.how)
            self.counts.retries[trajectory.outcome.value] += 1

    def ended(self, lease: Lease, trajectory: Trajectory, became: Became | None) -> None:
        """Report a failure.

        Raises:
            InfrastructureError: too many consecutive attempts failed.
        """
        if became is None:
            return
        self._on_failed(FailedAttempt.of(trajectory, became=became, version=lease.version))
        if self._failures_in_a_row == MAX_FAILURES_IN_A_ROW:
            raise InfrastructureError(
                f"{MAX_FAILURES_IN_A_ROW} attempts failed one after the other, the last "
                f"({trajectory.outcome.value}): {trajectory.failure}; finished attempts are kept, and the "
                "same command continues from there"
            )
