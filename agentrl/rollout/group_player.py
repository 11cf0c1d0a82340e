"""The group player: plays, retries, scores and settles the members of groups.

Training, validation and evaluation play groups the same way. Only the parts differ:

|                  | training                        | validation       | evaluation                        |
|------------------|---------------------------------|------------------|-----------------------------------|
| groups are       | leased from the replay buffer   | validation rows  | rows that the store lacks         |
| failures are     | treated by `rollout.on_outcome` | kept             | retried, then kept                |
| `Admission` is   | the room for leases             | one queue        | what the servers can handle       |
| results are      | shipped to the buffer           | collected        | stored                            |
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import trio

from agentrl.plugins.blame import failure_of
from agentrl.rollout.outcomes import GroupPolicy, OutcomeTable, Retry, RetryBudget, Settlement
from agentrl.rollout.recorder import Attempt
from agentrl.rollout.sampling import GreedySampling, Sampling
from agentrl.rollout.scopes import Scope
from agentrl.rollout.shipment import DroppedGroup, LeftOut, Shipment
from agentrl.tracking.attempts import Became
from agentrl.types import SCORED_OUTCOMES, Lease, Outcome, Task, Trajectory

Deliver = Callable[[Shipment], Awaitable[None]]
BECAME: Mapping[Settlement, Became] = {
    "mask": "masked",
    "leave_out": "left_out",
    "drop": "dropped",
    "keep": "not_scored",
}


class AttemptPlayer(Protocol):
    """Plays single attempts: `agentrl.rollout.player.Player`."""

    async def play(self, attempt: Attempt, sampling: Sampling) -> Trajectory: ...


class GroupScorer(Protocol):
    """Scores the members of a group in comparison with each other: `agentrl.rollout.scoring.Scorer`."""

    def has_group_rewards(self, task: Task) -> bool: ...

    async def score_group(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Trajectory]: ...


class Admission(Protocol):
    """Limits how many members are played at once, retries and their pauses included, and how many attempts of
    them.
    """

    async def begin(self, attempt: Attempt) -> None:
        """Wait until the member may be played."""

    def end(self, attempt: Attempt) -> None: ...

    def slot(self, attempt: Attempt) -> AbstractAsyncContextManager[None]:
        """Wait for a slot and occupy it in the block, which plays one attempt of the member."""


class PlayLog(Protocol):
    """Is told how attempts end."""

    def tried(self, lease: Lease, attempt: Attempt, trajectory: Trajectory, retry: Retry | None) -> None:
        """Record the end of an attempt. `retry`: what follows; None: it was the member's last attempt."""

    def ended(self, lease: Lease, trajectory: Trajectory, became: Became | None) -> None:
        """Record a member's result, or a failed scoring of its group. None: it is trained on, or scored."""


class Tracing(Protocol):
    """Makes what traces a group: `agentrl.extras.tracing.traces.GroupTracing`."""

    def scope(self) -> Scope:
        """Return the scope of a new attempt."""

    def scoring(self, lease: Lease, num_members: int) -> AbstractContextManager[object]:
        """Return the context of rewards that compare so many members of a group."""


class NoTracing:
    """Traces nothing."""

    def scope(self) -> Scope:
        return Scope()

    def scoring(self, lease: Lease, num_members: int) -> AbstractContextManager[object]:
        return nullcontext()


@dataclass(eq=False, slots=True)
class _Group:
    """A group in play. waiting: members to be scored together, with their settlements."""

    lease: Lease
    sampling: Sampling
    policy: GroupPolicy
    deliver: Deliver
    is_compared: bool
    scope: trio.CancelScope
    waiting: list[tuple[Trajectory, Settlement]] = field(default_factory=list)


class GroupPlayer:
    """Plays groups. No failure of an attempt escapes.

    `unit`: what a group is called in reports.
    """

    def __init__(
        self,
        player: AttemptPlayer,
        scorer: GroupScorer,
        outcomes: OutcomeTable,
        log: PlayLog,
        *,
        admission: Admission,
        scopes: Scope,
        unit: str,
        tracing: Tracing | None = None,
    ) -> None:
        """`tracing`: None: there is none."""
        self._player = player
        self._scorer = scorer
        self._outcomes = outcomes
        self._log = log
        self._admission = admission
        self._scopes = scopes
        self._unit = unit
        self._tracing = tracing or NoTracing()

    async def play(
        self,
        lease: Lease,
        sampling: Sampling,
        deliver: Deliver,
        *,
        members: Sequence[int] | None = None,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Play members of a group (None: all) and deliver each when it is settled; members that a reward
        compares, when the group is scored.

        If an outcome drops the group, the other members are cancelled and a DroppedGroup is delivered. A
        greedy attempt is the last member, played at temperature 0. Reports `started` when all members are
        admitted.
        """
        async with trio.open_nursery() as nursery:
            policy, is_compared = (
                GroupPolicy(lease, self._outcomes),
                self._scorer.has_group_rewards(lease.task),
            )
            group = _Group(lease, sampling, policy, deliver, is_compared, nursery.cancel_scope)
            for member in range(lease.num_attempts) if members is None else members:
                attempt = Attempt(
                    lease.group_id,
                    member,
                    lease.task,
                    is_greedy=member == lease.group_size,
                    scope=self._tracing.scope(),
                )
                await self._admission.begin(attempt)
                nursery.start_soon(self._play_member, group, attempt)
            task_status.started()
        if group.waiting and policy.dropped_by is None:
            await self._score_together(group)
        for trajectory, settlement in group.waiting:
            await self._end(group, trajectory, "drop" if policy.dropped_by else settlement)
        if policy.dropped_by is not None:
            await deliver(DroppedGroup(lease.group_id, policy.dropped_by.value))

    async def _play_member(self, group: _Group, attempt: Attempt) -> None:
        """Play a member, retry it while its outcome allows a retry and the retry budget lasts, and settle
        it.
        """
        budget = RetryBudget(self._outcomes)
        sampling = GreedySampling() if attempt.is_greedy else group.sampling
        member = f"{self._unit} {attempt.group_id} member {attempt.member}"
        title = f"{member} ({attempt.task.agent_name})"
        try:
            while True:
                with attempt.scope.attach(self._scopes, title, doing="its agent loop", key=attempt.key):
                    async with self._admission.slot(attempt):
                        last = await self._player.play(attempt, sampling)
                retry = budget.after(last.outcome)
                self._log.tried(group.lease, attempt, last, retry)
                if retry is None:
                    break
                attempt.survived.clear()
                with self._scopes.open(f"{member}: pause before another attempt"):
                    await trio.sleep(retry.pause_s)
        finally:
            self._admission.end(attempt)
        await self._settle(group, last)

    async def _settle(self, group: _Group, last: Trajectory) -> None:
        """Settle a member after its last attempt. A compared one waits for the others."""
        settlement = group.policy.settle(last)
        if group.is_compared and last.outcome in SCORED_OUTCOMES and settlement in ("train", "mask", "keep"):
            group.waiting.append((last, settlement))
        else:
            await self._end(group, last, settlement)

    async def _score_together(self, group: _Group) -> None:
        """Score the waiting members together, ordered by member. If scoring fails for good, all of them
        become reward errors.
        """
        group.waiting.sort(key=lambda waiting: waiting[0].member)
        members, task = [trajectory for trajectory, _ in group.waiting], group.lease.task
        budget = RetryBudget(self._outcomes)
        while True:
            try:
                title = f"{self._unit} {group.lease.group_id}: rewards that compare its members"
                with self._scopes.open(title), self._tracing.scoring(group.lease, len(members)):
                    scored = await self._scorer.score_group(task, members)
                group.waiting = [
                    (trajectory, settlement)
                    for trajectory, (_, settlement) in zip(scored, group.waiting, strict=True)
                ]
                return
            except Exception as error:  # noqa: BLE001 - boundary of one group
                failure = failure_of(error)
            failed = [t.replace(outcome=Outcome.REWARD_ERROR, failure=failure, rewards=()) for t in members]
            retry = budget.after(Outcome.REWARD_ERROR) if self._outcomes.retries_scoring else None
            if retry is None:
                settlement = group.policy.settle_unscored()
                group.waiting = [(trajectory, settlement) for trajectory in failed]
                return
            for trajectory in failed:
                self._log.ended(group.lease, trajectory, retry.how)
            await trio.sleep(retry.pause_s)

    async def _end(self, group: _Group, last: Trajectory, settlement: Settlement) -> None:
        """Record and deliver a settled member. One that drops its group cancels the other members."""
        is_scored = last.outcome in SCORED_OUTCOMES
        self._log.ended(
            group.lease, last, None if settlement == "keep" and is_scored else BECAME.get(settlement)
        )
        match settlement:
            case "train" | "mask" | "keep":
                await group.deliver(last)
            case "leave_out":
                await group.deliver(LeftOut(last.group_id, last.member, last.outcome.value))
            case "drop":
                group.scope.cancel()
