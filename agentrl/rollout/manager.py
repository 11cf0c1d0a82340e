"""The agent loop manager: leases groups, plays their members concurrently, and ships each trajectory when it
finishes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import trio

from agentrl.config.agent import AgentConfig
from agentrl.config.reward import RewardConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.plugins.call_threads import CallThreads
from agentrl.registered import all_of
from agentrl.rollout.attempt_log import AttemptLog
from agentrl.rollout.frozen_servers import StartedKeys
from agentrl.rollout.group_player import GroupPlayer, PlayLog
from agentrl.rollout.outcomes import OutcomeTable, Retry
from agentrl.rollout.player import unplayed
from agentrl.rollout.player_stack import StackParts, Validating
from agentrl.rollout.recorder import Attempt
from agentrl.rollout.sampling import Sampling
from agentrl.rollout.scopes import Scope
from agentrl.rollout.shipment import MAX_SHIPMENT, DroppedGroup, Shipment, TrajectorySink, ship
from agentrl.rollout.stats import RolloutStats
from agentrl.rollout.tracing import AttemptTracing
from agentrl.servers.router import Router
from agentrl.tracking.attempts import Became
from agentrl.types import Failure, Lease, Outcome, Trajectory

EMPTY_LEASE_PAUSE_S = 0.05
"""Pause after an empty lease.

Sources should wait by themselves; this prevents a busy loop if one does not.
"""
WITHDRAWN_INTERVAL_S = 5.0
"""Seconds between polls for withdrawn leases."""


class TaskSource(Protocol):
    """A source of groups to play, such as the replay buffer."""

    async def lease(self, limit: int) -> Sequence[Lease]:
        """Wait for a group and return at most `limit` groups; [] if none came in time."""

    async def withdrawn(self) -> Sequence[int]:
        """Return the groups to stop playing: another owner finished a copy first, or the lease has ended."""


@dataclass(eq=False, slots=True)
class _LeasedGroup:
    """A leased group in play.

    unsettled: number of its members that still count against the concurrency limit.
    """

    unsettled: int
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class AgentLoopManager:
    """Runs agent loops. `run` plays the groups that a source leases, until cancelled; `play` plays given
    groups once.

    A lease ends in one of two ways: each member is added or left out, or the group is dropped with the
    outcome that ended it (see `outcomes`). A greedy attempt is the last member. It is retried and scored like
    the others, but never left out.
    """

    def __init__(
        self,
        agent: AgentConfig,
        rollout: RolloutConfig,
        reward: RewardConfig,
        router: Router,
        parts: StackParts,
        *,
        attempts_per_group: int | None = None,
        validation: Validating | None = None,
        tracer: AttemptTracing | None = None,
    ) -> None:
        """Build the players and the shared tools.

        `attempts_per_group`: members of a leased group, used to lease no more groups than fit; None:
            `rollout.group_size`.
        `validation`: settings of `play` that differ from `run`; None: no difference.
        `tracer`: makes traces of attempts; None: there are none.
        """
        self._rollout = rollout
        self._attempts_per_group = attempts_per_group or rollout.group_size
        self._router = router
        stacks = parts.open_stacks(agent, reward, router, validation)
        training, validating, self._tools = stacks.training, stacks.validation, stacks.tools
        self._stacks = {training, validating}
        self._stats = RolloutStats()
        self._counters = all_of("agentrl.counters")
        self.attempts = AttemptLog()  # training attempts only
        self.scopes = Scope()  # root of the tree of live scopes
        self._claimed = 0  # unsettled members of leased groups
        self._leased: dict[int, _LeasedGroup] = {}
        self._settled = trio.Event()
        limit = rollout.max_concurrent_trajectories
        slots = trio.CapacityLimiter(limit)
        training_log: PlayLog = _TrainingLog(self.attempts, self._stats)
        validation_log: PlayLog = _ValidationLog(self.attempts, self._stats)
        if tracer is not None:
            training_log = tracer.log(training_log, "training")
            validation_log = tracer.log(validation_log, "validation")
        self._training = GroupPlayer(
            training.player,
            training.scorer,
            OutcomeTable.of_training(rollout),
            training_log,
            admission=_Queue(None, slots, self._stats),  # leases are limited by `_room`
            scopes=self.scopes,
            unit="group",
            tracing=None if tracer is None else tracer.of("training"),
        )
        self._validation = GroupPlayer(
            validating.player,
            validating.scorer,
            OutcomeTable.keeping(),
            validation_log,
            # Slots are FIFO. This queue keeps training attempts from waiting behind a whole validation.
            admission=_Queue(limit, slots, self._stats),
            scopes=self.scopes,
            unit="validation row",
            tracing=None if tracer is None else tracer.of("validation"),
        )

    # ----------------------------------------------------------------------------------------------- training

    async def run(self, source: TaskSource, sink: TrajectorySink) -> None:
        """Lease, play and ship until cancelled.

        Errors of the source or the sink end it; errors of an attempt never do.
        """
        send, receive = trio.open_memory_channel[Shipment](MAX_SHIPMENT)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._router.watch)
            nursery.start_soon(ship, receive, sink, self.scopes)
            nursery.start_soon(self._claim, source, send, nursery)
            nursery.start_soon(self._give_up, source)

    async def _claim(
        self, source: TaskSource, out: trio.MemorySendChannel[Shipment], nursery: trio.Nursery
    ) -> None:
        """Consumes leases; waits for room; unblocked by settled members; starts one task per group."""
        while True:
            room = await self._room()
            with self.scopes.open(f"lease up to {room} groups"):
                leases = await source.lease(room)
            for lease in leases:
                self._claimed += lease.num_attempts
                nursery.start_soon(self._play_leased, lease, out)
            if not leases:
                await trio.sleep(EMPTY_LEASE_PAUSE_S)

    async def _give_up(self, source: TaskSource) -> None:
        """Consumes withdrawn leases; unblocked by a timer; cancels their attempts, which makes room."""
        while True:
            await trio.sleep(WITHDRAWN_INTERVAL_S)
            if self._leased:
                for group_id in await source.withdrawn():
                    if group_id in self._leased:
                        self._leased[group_id].scope.cancel()

    async def _room(self) -> int:
        """Wait until there is room for a whole group and return the number of groups that fit."""
        while True:
            free = self._rollout.max_concurrent_trajectories - self._claimed
            if free >= self._attempts_per_group:
                return free // self._attempts_per_group
            if self._claimed == 0:  # a group larger than the limit plays alone; its members share the slots
                return 1
            await self._settled.wait()

    async def _play_leased(self, lease: Lease, out: trio.MemorySendChannel[Shipment]) -> None:
        """Play a group until all members are settled, or until it is dropped or withdrawn."""
        group = _LeasedGroup(lease.num_attempts)

        async def deliver(shipment: Shipment) -> None:
            if isinstance(shipment, DroppedGroup):
                self._stats.group_dropped(shipment.reason)
                await out.send(shipment)
                return
            try:
                out.send_nowait(shipment)  # there is usually room, so no need to let other tasks run first
            except trio.WouldBlock:
                await out.send(shipment)
            group.unsettled -= 1
            self._settle(1)

        if lease.group_id in self._leased:  # its former lease has ended and it was leased to us again
            self._leased[lease.group_id].scope.cancel()
        self._leased[lease.group_id] = group
        with group.scope:
            await self._training.play(lease, self._rollout, deliver)
        if self._leased.get(lease.group_id) is group:
            del self._leased[lease.group_id]
        if group.scope.cancelled_caught:
            self._stats.group_withdrawn()
        self._settle(group.unsettled)

    def _settle(self, count: int) -> None:
        self._claimed -= count
        self._settled.set()
        self._settled = trio.Event()

    # --------------------------------------------------------------------------------------------- validation

    async def play(
        self, leases: Sequence[Lease], sampling: Sampling, *, timeout_s: float = math.inf
    ) -> list[Trajectory]:
        """Play every member of `leases` once and return all trajectories, failures included, ordered by lease
        and member.

        An attempt that has not ended after `timeout_s` seconds is cancelled and returned as a timeout without
        tokens.
        """
        ended: dict[tuple[int, int], Trajectory] = {}  # (index of the lease, member)

        async def collect(index: int, played: Shipment) -> None:
            assert isinstance(played, Trajectory), "failures are kept"
            ended[index, played.member] = played

        async with trio.open_nursery() as watching:
            watching.start_soon(self._router.watch)
            with trio.move_on_after(timeout_s):
                async with trio.open_nursery() as nursery:
                    for index, lease in enumerate(leases):
                        await nursery.start(self._validation.play, lease, sampling, partial(collect, index))
            watching.cancel_scope.cancel()
        late = Failure(f"the validation ended after eval.timeout_s={timeout_s:g}, before this attempt did")
        return [
            ended.get((index, member))
            or unplayed(Attempt(lease.group_id, member, lease.task), Outcome.TIMEOUT, late)
            for index, lease in enumerate(leases)
            for member in range(lease.group_size)
        ]

    # --------------------------------------------------------------------------------------------------- both

    @property
    def leased_groups(self) -> tuple[int, ...]:
        """The leased groups in play."""
        return tuple(self._leased)

    def set_frozen_servers(self, started: StartedKeys) -> None:
        """Use these servers for the opponents and the teacher that servers are started for."""
        for stack in self._stacks:
            stack.set_frozen_servers(started)

    async def aclose(self) -> None:
        """Stop the processes in which rewards run, and close the connections to opponents."""
        for stack in self._stacks:
            await stack.aclose()

    def stats(self) -> dict[str, float]:
        """Return counters of everything played so far (see RolloutStats) and of the router. Cheap and
        thread-safe.

        `idle_s`: seconds without a running generation, since the first generation started.
        `boxes_...`: see BoxCounts. `pace_...`: see TokenPace.
        """
        router = self._router
        return self._stats.snapshot() | {
            "idle_s": router.idle.seconds(),
            "generations_in_flight": float(router.idle.num_running),
            "servers_up": float(router.num_up),
            "server_failures": float(router.num_server_failures),
            "servers_drained": float(router.num_drained),
            "sampled_tokens": float(router.work.sampled_tokens),
            "prefilled_tokens": float(router.work.prefilled_tokens),
            "redone_tokens": float(router.work.redone_tokens),
            "tool_breaker_openings": float(self._tools.num_breaker_openings),
            "stuck_threads": float(CallThreads.num_stuck_here()),
            "outstanding_tokens": float(sum(router.outstanding_tokens().values())),
            **{f"pace_{name}": value for name, value in router.pace.sums().items()},
            **{name: value for counters in self._counters for name, value in counters().items()},
        }


class _Queue:
    """Admits up to `limit` members at once (None: all), and their attempts to the slots of the process."""

    def __init__(self, limit: int | None, slots: trio.CapacityLimiter, stats: RolloutStats) -> None:
        self._limiter = None if limit is None else trio.CapacityLimiter(limit)
        self._slots = slots
        self._stats = stats

    async def begin(self, attempt: Attempt) -> None:
        if self._limiter is not None:
            await self._limiter.acquire_on_behalf_of(attempt.key)

    def end(self, attempt: Attempt) -> None:
        if self._limiter is not None:
            self._limiter.release_on_behalf_of(attempt.key)

    def slot(self, attempt: Attempt) -> _Slot:
        return _Slot(attempt, self._slots, self._stats)


class _Slot:
    """Occupies a slot of the process while an attempt plays."""

    __slots__ = ("_attempt", "_slots", "_stats")

    def __init__(self, attempt: Attempt, slots: trio.CapacityLimiter, stats: RolloutStats) -> None:
        self._attempt = attempt
        self._slots = slots
        self._stats = stats

    async def __aenter__(self) -> None:
        try:
            self._slots.acquire_nowait()  # fair: it fails while others wait
        except trio.WouldBlock:
            with self._attempt.scope.open("queue for a slot"):
                await self._slots.acquire()
        self._stats.begin()

    async def __aexit__(self, *_: object) -> None:
        self._stats.end()
        self._slots.release()


class _TrainingLog:
    """Reports all attempts to the driver, and counts what became of them."""

    def __init__(self, attempts: AttemptLog, stats: RolloutStats) -> None:
        self._attempts = attempts
        self._stats = stats

    def tried(self, lease: Lease, attempt: Attempt, trajectory: Trajectory, retry: Retry | None) -> None:
        self._stats.finished(trajectory)
        self._attempts.survived(trajectory, lease, attempt.survived, is_training=True)
        if retry is not None:
            self._stats.became(retry.how, trajectory)
            self._attempts.ended(trajectory, lease, retry.how)

    def ended(self, lease: Lease, trajectory: Trajectory, became: Became | None) -> None:
        if became == "masked" or became == "left_out":
            self._stats.became(became, trajectory)
        self._attempts.ended(trajectory, lease, became)


class _ValidationLog:
    """Reports the tool failures that attempts survived, and counts attempts. The driver reports how they
    ended.
    """

    def __init__(self, attempts: AttemptLog, stats: RolloutStats) -> None:
        self._attempts = attempts
        self._stats = stats

    def tried(self, lease: Lease, attempt: Attempt, trajectory: Trajectory, retry: Retry | None) -> None:
        self._stats.finished(trajectory)
        self._attempts.survived(trajectory, lease, attempt.survived, is_training=False)

    def ended(self, lease: Lease, trajectory: Trajectory, became: Became | None) -> None:
        return
