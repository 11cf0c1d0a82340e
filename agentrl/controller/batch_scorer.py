"""`BatchScorer`: scores batches with the rewards of scope `batch`, in a process of its own.

It is the first to have a whole batch: it reads the trajectories from their files, the tasks from the buffer,
and asks the ranks of the reward model. The controller sends facts, and gets what scoring changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NoReturn

from agentrl import heap
from agentrl.adapters.catalog import named_plugins
from agentrl.buffer.buffer import ReplayBuffer
from agentrl.cluster.actors import Actor, ActorKind, RetryPolicy
from agentrl.cluster.pools import beside_driver
from agentrl.cluster.workers import Workers
from agentrl.config.schema import Config
from agentrl.controller.batch_rewards import BatchRewards, failed_together
from agentrl.controller.conversations import Conversations
from agentrl.controller.reward_role import RewardRole
from agentrl.data.attempt_facts import AttemptFacts, reward_places
from agentrl.errors import ActorDied, InfrastructureError, RewardError
from agentrl.learner.reward_model import RewardModel
from agentrl.plugins.blame import RaisedElsewhere, blaming, failure_of
from agentrl.types import Failure, JsonObject, Outcome, RewardEvent, Task, Trajectory

SCORER = ActorKind("BatchScorer", "the scorer of batches", timeout_s=86_400.0, num_threads=1)
"""A day: every reward has its own deadline, and so have the ranks of a reward model. This one is only for a
process that hangs outside of them.
"""

RESTART_S = 120.0
"""How long a new process may take to load the rewards after a death."""


@dataclass(frozen=True, slots=True)
class BatchScore:
    """What scoring changed of an attempt; the fields are those of `AttemptFacts`."""

    outcome: Outcome
    failure: Failure | None
    rewards: tuple[RewardEvent, ...]
    reward_places: tuple[int, ...]
    metrics: Mapping[str, float]
    added_info: JsonObject

    @classmethod
    def of(cls, stored: Trajectory, scored: Trajectory) -> BatchScore:
        known = stored.extra_info
        added = {name: value for name, value in scored.extra_info.items() if known.get(name) != value}
        places = reward_places(scored)
        return cls(scored.outcome, scored.failure, scored.rewards, places, scored.metrics, added)

    def on_facts(self, attempt: AttemptFacts) -> AttemptFacts:
        """Return the attempt as it is after scoring."""
        return attempt.replace(
            outcome=self.outcome,
            failure=self.failure,
            rewards=self.rewards,
            reward_places=self.reward_places,
            metrics=self.metrics,
            added_info={**attempt.added_info, **self.added_info},
        )

    def on_trajectory(self, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory as it is after scoring."""
        return trajectory.replace(
            outcome=self.outcome,
            failure=self.failure,
            rewards=self.rewards,
            metrics=self.metrics,
            extra_info={**trajectory.extra_info, **self.added_info},
        )


@dataclass(frozen=True, slots=True)
class Unscored:
    """A reward failed. text: of the RewardError; failure: with the line in the user's file."""

    text: str
    failure: Failure


class BatchScorer:
    """The rewards of scope `batch`, for training and validation."""

    def __init__(
        self, config: Config, buffer: Actor[ReplayBuffer], ranks: Workers[RewardModel] | None
    ) -> None:
        """ranks: of the reward model, which must be ready before anything is scored; None: there is none.

        Raises:
            UserError: a reward is unknown, or refuses its config.
        """
        plugins = named_plugins(config.agent, config.reward, config.eval)
        self._buffer = buffer
        self._rewards, self._validation_rewards = (
            BatchRewards(
                own.reward, plugins, max_response_tokens=own.agent.max_response_tokens, model=own.model
            )
            for own in (config, config.of_validation)
        )
        if ranks is not None:
            conversations = Conversations(config.reward_model, config.agent, plugins)
            role = RewardRole(ranks, conversations, config.reward_model)
            for rewards in (self._rewards, self._validation_rewards):
                rewards.connect(role.score)

    def score(self, attempts: Sequence[AttemptFacts]) -> list[BatchScore] | Unscored:
        """Score a batch; see `BatchRewards.score`.

        Raises:
            LearnerError: a rank of the reward model was lost.
            DiskError: a trajectory is missing or damaged.
        """
        scores = self._score(attempts)
        heap.release_free_memory()  # the trajectories were freed
        return scores

    def _score(self, attempts: Sequence[AttemptFacts]) -> list[BatchScore] | Unscored:
        tasks = self._tasks([attempt.group_id for attempt in attempts])
        stored = [attempt.load() for attempt in attempts]
        try:
            scored = self._rewards.score(tasks, stored)
        except RewardError as error:  # its cause and traceback would not survive the way
            return Unscored(str(error), failure_of(error))
        return [BatchScore.of(*pair) for pair in zip(stored, scored, strict=True)]

    def _tasks(self, group_ids: Sequence[int]) -> list[Task]:
        groups = list(dict.fromkeys(group_ids))
        try:
            tasks = dict(zip(groups, self._buffer.run(ReplayBuffer.tasks, groups), strict=True))
        except ActorDied as error:  # the buffer's death must not look like that of this process
            raise InfrastructureError(str(error)) from error
        return [tasks[group_id] for group_id in group_ids]

    def wait_until_ready(self) -> None:
        """Return at once: the rewards are loaded."""

    def score_validation(self, tasks: Sequence[Task], trajectories: Sequence[Trajectory]) -> list[BatchScore]:
        """Score all attempts of a validation; see `BatchRewards.score_validation`.

        Raises:
            LearnerError: a rank of the reward model was lost.
        """
        scored = self._validation_rewards.score_validation(tasks, trajectories)
        return [BatchScore.of(*pair) for pair in zip(trajectories, scored, strict=True)]


def launch_scorer(
    config: Config, buffer: Actor[ReplayBuffer], ranks: Workers[RewardModel] | None
) -> Actor[BatchScorer]:
    """Start the scorer beside the controller, without waiting for it. A dead one is started again."""
    options = {"max_restarts": -1, "scheduling_strategy": beside_driver()}
    return SCORER.launch(options, BatchScorer, config, buffer, ranks)


class RemoteBatchRewards:
    """The controller's side of the scorer."""

    def __init__(self, *, is_any: bool) -> None:
        """is_any: whether there is a reward of scope `batch`."""
        self.is_any = is_any
        self._scorer: Actor[BatchScorer] | None = None

    def connect(self, scorer: Actor[BatchScorer]) -> None:
        """Let `scorer` score from here on."""
        self._scorer = scorer

    def score(self, attempts: Sequence[AttemptFacts]) -> list[AttemptFacts]:
        """Return the attempts of a batch with these rewards added.

        Raises:
            RewardError: a reward failed, or ended the scorer's process; no attempt is scored then.
            LearnerError: a rank of the reward model was lost.
            DiskError: a trajectory is missing or damaged.
        """
        assert self._scorer is not None, "there is no reward of scope `batch`"
        try:
            found = self._scorer.run(BatchScorer.score, attempts)
        except ActorDied as error:
            raise self._died(error) from error
        if isinstance(found, Unscored):
            _raise(found)
        return [score.on_facts(attempt) for attempt, score in zip(attempts, found, strict=True)]

    def score_validation(self, tasks: Sequence[Task], trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return all attempts of a validation. Those that did not fail are scored, or fail, together.

        Raises:
            LearnerError: a rank of the reward model was lost.
        """
        assert self._scorer is not None, "there is no reward of scope `batch`"
        try:
            found = self._scorer.run(BatchScorer.score_validation, tasks, trajectories)
        except ActorDied as error:
            return failed_together(trajectories, self._died(error))
        return [score.on_trajectory(t) for t, score in zip(trajectories, found, strict=True)]

    def _died(self, error: ActorDied) -> RewardError:
        """Wait for the process that Ray starts instead of the one that died; return the reward's error."""
        assert self._scorer is not None
        waiting = RetryPolicy((ActorDied,), for_s=RESTART_S)
        self._scorer.within(RESTART_S).retrying(waiting).run(BatchScorer.wait_until_ready)
        return RewardError(f"{error}; rewards of scope batch run in its process")


def _raise(unscored: Unscored) -> NoReturn:
    """Raise the RewardError of the scorer's process; `failure_of` finds the line in the user's file."""
    plugin = unscored.failure.plugin
    with nullcontext() if plugin is None else blaming(plugin.kind, plugin.name):
        raise RewardError(unscored.text) from RaisedElsewhere(unscored.failure)
