"""`Batches`: takes batches from the buffer, and scores them with the rewards that need a whole batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.ledger import NO_VARIANCE
from agentrl.cluster.actors import Actor
from agentrl.cluster.rollouts import RolloutFleet
from agentrl.config.buffer import BufferConfig
from agentrl.controller.batch_scorer import RemoteBatchRewards
from agentrl.controller.credit import group_attempts
from agentrl.controller.observe import Observer
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.errors import InfrastructureError, RewardError
from agentrl.plugins.blame import failure_of
from agentrl.rollout.loop_gaps import without_gaps
from agentrl.tracking.attempts import FailedAttempt
from agentrl.tracking.spans import BATCH_REWARD, Attribute, TracedBlock
from agentrl.types import SCORED_OUTCOMES, Group, Outcome

POLL_S = 1.0
"""Seconds that one request to the buffer waits. After it, servers and actors are checked."""
MAX_UNSCORED_BATCHES = 3
"""The run ends when rewards of scope `batch` fail on this many batches in a row: the reward is broken."""


class Batches:
    """The batches of a run, in order of their steps."""

    def __init__(
        self,
        config: BufferConfig,
        buffer: Actor[ReplayBuffer],
        rollouts: RolloutFleet,
        rewards: RemoteBatchRewards,
        observer: Observer,
    ) -> None:
        self._config = config
        self._buffer = buffer
        self._rollouts = rollouts
        self._rewards = rewards
        self._observer = observer

    def take(self, *, step: int, version: int, heal: Callable[[], None]) -> list[Group[AttemptFacts]]:
        """Wait for the batch of `step` and score it with the rewards of scope `batch`.

        A batch that cannot be scored is replaced by the next.

        Args:
            version: of the servers' weights, for the records of attempts that cannot be scored.
            heal: called while it waits.

        Raises:
            InfrastructureError: no trajectory finished for `buffer.stall_timeout_s`, or a process is lost.
            RewardError: MAX_UNSCORED_BATCHES batches in a row could not be scored.
        """
        unscored = 0
        while True:
            with self._observer.timer("take"):
                groups = self._wait_for_groups(step, heal)
            if not self._rewards.is_any:
                return groups
            try:
                attempts = [attempt for group in groups for attempt in group.attempts]
                with (
                    self._observer.timer("reward"),
                    traced_batch(self._rollouts, "training", step=step, num_attempts=len(attempts)),
                ):
                    return group_attempts(self._rewards.score(attempts))
            except RewardError as error:
                unscored += 1
                if unscored == MAX_UNSCORED_BATCHES:
                    raise
                self._observer.say(
                    f"a batch of {len(groups)} groups could not be scored and will be replaced: {error}"
                )
                self._record_unscored(groups, error, step=step - 1, version=version)
                self._buffer.run(ReplayBuffer.reject, step, Outcome.REWARD_ERROR.value)

    def _record_unscored(
        self, groups: Sequence[Group[AttemptFacts]], error: RewardError, *, step: int, version: int
    ) -> None:
        failure = failure_of(error)
        attempts = (t for group in groups for t in group.attempts if t.outcome in SCORED_OUTCOMES)
        failed = (t.replace(outcome=Outcome.REWARD_ERROR, failure=failure) for t in attempts)
        self._observer.failures.add(
            [FailedAttempt.of(t, became="dropped", version=version) for t in failed], step=step
        )

    def _wait_for_groups(self, step: int, heal: Callable[[], None]) -> list[Group[AttemptFacts]]:
        """Wait for `buffer.groups_per_step` complete groups within the staleness bound."""
        started = time.monotonic()
        constant_before = self._num_constant()
        while True:
            batch = self._buffer.run(ReplayBuffer.take, self._config.groups_per_step, POLL_S, step)
            if batch is not None:
                return group_attempts(batch)
            heal()
            self._check_progress(waited_s=time.monotonic() - started)
            check_variance(self._num_constant() - constant_before, self._config)

    def _check_progress(self, *, waited_s: float) -> None:
        stats = self._buffer.run(ReplayBuffer.stats)
        if min(waited_s, stats["since_last_add_s"]) > self._config.stall_timeout_s:
            why = self._observer.failures.tally.most_common()
            raise InfrastructureError(
                f"no trajectory finished for buffer.stall_timeout_s={self._config.stall_timeout_s:g}; "
                + (f"most attempts failed with: {why}; " if why else "")
                + f"groups: {self._buffer.run(ReplayBuffer.counts)}; rollouts: "
                f"{without_gaps(self._rollouts.stats())}"
            )

    def _num_constant(self) -> int:
        return (
            self._buffer.run(ReplayBuffer.counts).dropped.get(NO_VARIANCE, 0)
            if self._config.drop_constant_groups
            else 0
        )


def traced_batch(
    rollouts: RolloutFleet, kind: str, *, step: int, num_attempts: int
) -> AbstractContextManager[None]:
    """Return the context of rewards that score a batch: a trace of its own. kind: `training` or
    `validation`.
    """
    attributes: dict[str, Attribute] = {
        "agentrl.kind": kind,
        "agentrl.step": step,
        "agentrl.attempts": num_attempts,
    }
    return TracedBlock(BATCH_REWARD, attributes, rollouts.trace)


def check_variance(num_dropped: int, buffer: BufferConfig) -> None:
    """End a run whose tasks are all too easy or too hard: it would wait forever for groups with variance.

    Args:
        num_dropped: groups without reward variance that were dropped while waiting for one batch.

    Raises:
        InfrastructureError: `num_dropped` reached `buffer.max_constant_batches` times the batch size.
    """
    if num_dropped >= buffer.max_constant_batches * buffer.groups_per_step:
        raise InfrastructureError(
            f"{num_dropped} groups without variance were dropped while waiting for one batch "
            f"(buffer.max_constant_batches={buffer.max_constant_batches}): the tasks are too easy "
            "or too hard for the policy; choose other tasks, or buffer.drop_constant_groups=false"
        )
