"""The agent loop manager: leases groups, plays their members concurrently, and ships each trajectory when it
finishes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import trio

from agentrl.chat.chat import Chat
from agentrl.config.agent import AgentConfig
from agentrl.config.reward import RewardConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.plugins import Plugins
from agentrl.plugins.blame import failure_of
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.rollout.attempt_log import AttemptLog
from agentrl.rollout.outcomes import OutcomePolicy, RetryBudget
from agentrl.rollout.player import Player, unplayed
from agentrl.rollout.player_stack import Validating, open_stacks
from agentrl.rollout.recorder import Attempt
from agentrl.rollout.router import Router
from agentrl.rollout.sampling import GreedySampling
from agentrl.rollout.scopes import Scope
from agentrl.rollout.scoring import Scorer
from agentrl.rollout.session import PromptLimits, Sampling
from agentrl.rollout.shared_tools import SharedTools
from agentrl.rollout.shipment import MAX_SHIPMENT, DroppedGroup, LeftOut, Shipment, TrajectorySink, ship
from agentrl.rollout.stats import RolloutStats
from agentrl.tracking.attempts import Became
from agentrl.types import SCORED_OUTCOMES, Failure, Lease, Outcome, Trajectory

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
class _Played:
    """A leased group in play.

    unsettled: number of its members that still count against the concurrency limit.
    """

    lease: Lease
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
        *,
        plugins: Plugins,
        chat: Chat,
        router: Router,
        host: AsyncioHost,
        prompt: PromptLimits,
        attempts_per_group: int | None = None,
        validation: Validating | None = None,
    ) -> None:
        """Build the players and the shared tools.

        `attempts_per_group`: members of a leased group, used to lease no more groups than fit; None:
            `rollout.group_size`.
        `validation`: settings of `play` that differ from `run`; None: no difference.
        """
        self._rollout = rollout
        self._attempts_per_group = attempts_per_group or rollout.group_size
        self._router = router
        self._tools = SharedTools(plugins.tools, agent, host=host, codec=chat)
        self._training, self._validation = open_stacks(
            agent, reward, validation, plugins=plugins, chat=chat, router=router, host=host, prompt=prompt, tools=self._tools
        )
        self._stats = RolloutStats()
        self.attempts = AttemptLog()  # training attempts only
        self.scopes = Scope()  # root of the tree of live scopes
        self._claimed = 0  # unsettled members of leased groups
        self._playing: dict[int, _Played] = {}
        self._settled = trio.Event()
        self._slots = trio.CapacityLimiter(rollout.max_concurrent_trajectories)
        # Slots are FIFO. This second limiter keeps training attempts from queueing behind a whole validation.
        self._queue_of_play = trio.CapacityLimiter(rollout.max_concurrent_trajectories)

    # ----------------------------------------------------------------------------------------------------- training

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

    async def _claim(self, source: TaskSource, out: trio.MemorySendChannel[Shipment], nursery: trio.Nursery) -> None:
        """Consumes leases; waits for room; unblocked by settled members; starts one task per group."""
        while True:
            room = await self._room()
            with self.scopes.open(f"lease up to {room} groups"):
                leases = await source.lease(room)
            for lease in leases:
                self._claimed += lease.num_attempts
                nursery.start_soon(self._play_group, lease, out)
            if not leases:
                await trio.sleep(EMPTY_LEASE_PAUSE_S)

    async def _give_up(self, source: TaskSource) -> None:
        """Consumes withdrawn leases; unblocked by a timer; cancels their attempts, which makes room."""
        while True:
            await trio.sleep(WITHDRAWN_INTERVAL_S)
            if self._playing:
                for group_id in await source.withdrawn():
                    if group_id in self._playing:
                        self._playing[group_id].scope.cancel()

    async def _room(self) -> int:
        """Wait until there is room for a whole group and return the number of groups that fit."""
        while True:
            free = self._rollout.max_concurrent_trajectories - self._claimed
            if free >= self._attempts_per_group:
                return free // self._attempts_per_group
            if self._claimed == 0:  # a group larger than the limit plays alone; its members share the slots
                return 1
            await self._settled.wait()

    async def _play_group(self, lease: Lease, out: trio.MemorySendChannel[Shipment]) -> None:
        """Play a group until all members are settled, or until it is dropped or withdrawn."""
        group = _Played(lease, lease.num_attempts)
        if lease.group_id in self._playing:  # its former lease has ended and it was leased to us again
            self._playing[lease.group_id].scope.cancel()
        self._playing[lease.group_id] = group
        with group.scope:
            await self._play_out(group, out)
        if self._playing.get(lease.group_id) is group:
            del self._playing[lease.group_id]
        if group.scope.cancelled_caught:
            self._stats.group_withdrawn()
        self._settle(group.unsettled)

    async def _play_out(self, group: _Played, out: trio.MemorySendChannel[Shipment]) -> None:
        """Play all members. If an outcome drops the group, cancel the other members.

        Members are shipped as they finish. If a reward compares members, the scorable ones wait until all
        have finished.
        """
        lease = group.lease
        fate = OutcomePolicy(lease, self._rollout)
        compares = self._training.scorer.has_group_rewards(lease.task)
        waiting: list[Trajectory] = []

        async def play(member: int) -> None:
            trajectory = await self._play_member(lease, member)
            shipment = self._settle_member(trajectory, fate)
            if compares and isinstance(shipment, Trajectory) and shipment.outcome in SCORED_OUTCOMES:
                waiting.append(shipment)
                return
            self.attempts.ended(trajectory, lease, _became(shipment))
            if shipment is None:
                nursery.cancel_scope.cancel()
                return
            await out.send(shipment)
            group.unsettled -= 1
            self._settle(1)

        async with trio.open_nursery() as nursery:
            for member in range(lease.num_attempts):
                nursery.start_soon(play, member)
        if waiting and not fate.is_dropped:
            waiting = await self._score_group(self._training.scorer, lease, waiting, RetryBudget(self._rollout))
            if waiting[0].outcome is Outcome.REWARD_ERROR:  # group rewards fail for all members at once
                fate.end(waiting[0])
        for trajectory in waiting:
            self.attempts.ended(trajectory, lease, "dropped")
        if fate.reason is not None:
            self._stats.group_dropped(fate.reason)
            await out.send(DroppedGroup(lease.group_id, fate.reason))
        else:
            for trajectory in waiting:
                await out.send(trajectory)

    def _settle_member(self, last: Trajectory, fate: OutcomePolicy) -> Shipment | None:
        """Return what to ship for a member after its last attempt; None if it drops the group."""
        match fate.settle(last):
            case "train":
                return last
            case "mask":
                self._stats.became("masked", last)
                return last
            case "leave_out":
                self._stats.became("left_out", last)
                return LeftOut(last.group_id, last.member, last.outcome.value)
            case "drop":
                return None

    async def _score_group(
        self, scorer: Scorer, lease: Lease, trajectories: Sequence[Trajectory], further: RetryBudget | None
    ) -> list[Trajectory]:
        """Score the members of a group together, ordered by member, with the retries of `further` (None: no
        retries).

        If scoring fails for good, all of them are returned as reward errors.
        """
        members = sorted(trajectories, key=lambda t: t.member)
        while True:
            try:
                with self.scopes.open(f"group {members[0].group_id}: rewards that compare its members"):
                    return await scorer.score_group(lease.task, members)
            except Exception as error:  # noqa: BLE001 - boundary of one group
                failure = failure_of(error)
            failed = [t.replace(outcome=Outcome.REWARD_ERROR, failure=failure, rewards=()) for t in members]
            again = None if further is None else further.after(Outcome.REWARD_ERROR)
            if again is None:
                return failed
            for trajectory in failed:
                self.attempts.ended(trajectory, lease, again.how)
            await trio.sleep(again.pause_s)

    async def _play_member(self, lease: Lease, member: int) -> Trajectory:
        """Play one member, and retry it while its outcome allows a retry and the retry budget lasts."""
        attempt = Attempt(lease.group_id, member, lease.task, is_greedy=member == lease.group_size)
        further = RetryBudget(self._rollout)
        sampling = GreedySampling() if attempt.is_greedy else self._rollout
        while True:
            trajectory = await self._play_once(self._training.player, attempt, sampling)
            self.attempts.went_on(trajectory, lease, attempt.survived, is_training=True)
            again = further.after(trajectory.outcome)
            if again is None:
                return trajectory
            self._stats.became(again.how, trajectory)
            self.attempts.ended(trajectory, lease, again.how)
            with self.scopes.open(f"group {attempt.group_id} member {attempt.member}: pause before another attempt"):
                await trio.sleep(again.pause_s)

    def _settle(self, count: int) -> None:
        self._claimed -= count
        self._settled.set()
        self._settled = trio.Event()

    # --------------------------------------------------------------------------------------------------- validation

    async def play(self, leases: Sequence[Lease], sampling: Sampling, *, timeout_s: float = math.inf) -> list[Trajectory]:
        """Play every member of `leases` once and return all trajectories, failures included, ordered by lease
        and member.

        An attempt that has not ended after `timeout_s` seconds is cancelled and returned as a timeout without
        tokens.
        """
        ended: dict[tuple[int, int], Trajectory] = {}  # (index of the lease, member)
        async with trio.open_nursery() as watching:
            watching.start_soon(self._router.watch)
            with trio.move_on_after(timeout_s):
                async with trio.open_nursery() as nursery:
                    for index, lease in enumerate(leases):
                        nursery.start_soon(self._play_members, index, lease, sampling, ended)
            watching.cancel_scope.cancel()
        late = Failure(f"the validation ended after eval.timeout_s={timeout_s:g}, before this attempt did")
        return [
            ended.get((index, member)) or unplayed(Attempt(lease.group_id, member, lease.task), Outcome.TIMEOUT, late)
            for index, lease in enumerate(leases)
            for member in range(lease.group_size)
        ]

    async def _play_members(self, index: int, lease: Lease, sampling: Sampling, ended: dict[tuple[int, int], Trajectory]) -> None:
        """Play every member once and store the trajectories in `ended`; if a reward compares members, after
        it scored them.
        """
        members: dict[tuple[int, int], Trajectory] = {}
        side = self._validation
        compares = side.scorer.has_group_rewards(lease.task)

        async def play(member: int) -> None:
            async with self._queue_of_play:
                attempt = Attempt(lease.group_id, member, lease.task)
                trajectory = await self._play_once(side.player, attempt, sampling, of="validation row")
                self.attempts.went_on(trajectory, lease, attempt.survived, is_training=False)
            (members if compares else ended)[index, member] = trajectory

        async with trio.open_nursery() as nursery:
            for member in range(lease.group_size):
                nursery.start_soon(play, member)
        scored = [t for t in members.values() if t.outcome in SCORED_OUTCOMES]
        if scored:
            members |= {(index, t.member): t for t in await self._score_group(side.scorer, lease, scored, None)}
        ended.update(members)

    # ------------------------------------------------------------------------------------------------------ both

    async def _play_once(self, player: Player, attempt: Attempt, sampling: Sampling, *, of: str = "group") -> Trajectory:
        name = f"{of} {attempt.group_id} member {attempt.member} ({attempt.task.agent_name})"
        with attempt.scope.attach(self.scopes, name, doing="its agent loop", key=attempt.key):
            with attempt.scope.open("queue for a slot"):
                await self._slots.acquire()
            self._stats.begin()
            try:
                trajectory = await player.play(attempt, sampling)
            finally:
                self._stats.end()
                self._slots.release()
        self._stats.finished(trajectory)
        return trajectory

    async def aclose(self) -> None:
        """Stop the processes in which rewards run."""
        for side in {self._training, self._validation}:
            await side.scorer.aclose()

    def stats(self) -> dict[str, float]:
        """Return counters of everything played so far (see RolloutStats) and of the router. Cheap and
        thread-safe.

        `idle_s`: seconds without a running generation, since the first generation started.
        """
        router = self._router
        return self._stats.snapshot() | {
            "idle_s": router.idle.seconds(),
            "generations_in_flight": float(router.idle.num_running),
            "servers_up": float(router.num_up),
            "server_failures": float(router.num_server_failures),
            "servers_drained": float(router.num_drained),
            "prefilled_tokens": float(router.work.prefilled_tokens),
            "redone_tokens": float(router.work.redone_tokens),
            "tool_breaker_openings": float(self._tools.num_breaker_openings),
            "outstanding_tokens": float(sum(router.outstanding_tokens().values())),
        }


def _became(shipment: Shipment | None) -> Became:
    """Return what became of an attempt, given what was shipped for it."""
    if shipment is None:
        return "dropped"
    return "left_out" if isinstance(shipment, LeftOut) else "masked"
