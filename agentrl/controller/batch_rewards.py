"""Rewards of scope `batch`, as the process that scores them calls them (see `batch_scorer`)."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.chat import Chat
from agentrl.config.model import ModelConfig
from agentrl.config.reward import RewardConfig
from agentrl.errors import LearnerError
from agentrl.plugins import Plugins
from agentrl.plugins.blame import failure_of
from agentrl.rewards.reward_model import Ask, RewardModel
from agentrl.rewards.select import RewardTable
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.rollout.scoring import Scorer
from agentrl.servers.trio_run import in_trio
from agentrl.types import SCORED_OUTCOMES, Outcome, Task, Trajectory


class BatchRewards:
    """The rewards of scope `batch`."""

    def __init__(
        self, config: RewardConfig, plugins: Plugins, *, max_response_tokens: int, model: ModelConfig
    ) -> None:
        """Load the rewards, and the tokenizer of `model` if one of them reads decoded responses.

        Raises:
            UserError: a reward is unknown, or refuses its config.
        """
        self._config = config
        self._max_response_tokens = max_response_tokens
        self._table = RewardTable(config, plugins)
        self._chat = Chat.of(model) if self._table.reads_solution_str else None

    @property
    def is_any(self) -> bool:
        """Whether the config has a reward of scope `batch`."""
        return self._table.may_score("batch")

    def connect(self, ask: Ask) -> None:
        """Make the terms of the reward model call `ask` to score."""
        for reward in self._table.find(RewardModel):
            reward.connect(ask)

    def score(self, tasks: Sequence[Task], trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the trajectories of a batch with these rewards added.

        Failed attempts are returned unchanged.

        Args:
            tasks: the task of each trajectory.

        Raises:
            RewardError: a reward raised, timed out or returned a non-finite number; no trajectory is scored
                then.
            LearnerError: a rank of the reward model was lost.
        """
        places = _scored_places(trajectories)
        scored = in_trio(
            self._score, [tasks[place] for place in places], [trajectories[place] for place in places]
        )
        return _replaced(trajectories, places, scored)

    def score_validation(self, tasks: Sequence[Task], trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return all attempts of a validation. Those that did not fail are scored, or fail, together.

        Raises:
            LearnerError: a rank of the reward model was lost.
        """
        places = _scored_places(trajectories)
        if not places:
            return list(trajectories)
        try:
            return self.score(tasks, trajectories)
        except Exception as error:  # noqa: BLE001 - boundary of one batch
            return failed_together(trajectories, error)

    async def _score(self, tasks: Sequence[Task], trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        with AsyncioHost() as host:
            scorer = Scorer(
                self._config,
                self._table,
                host=host,
                max_response_tokens=self._max_response_tokens,
                chat=self._chat,
            )
            try:
                return await scorer.score_batch(tasks, trajectories)
            finally:
                await scorer.aclose()


def failed_together(trajectories: Sequence[Trajectory], error: BaseException) -> list[Trajectory]:
    """Return the trajectories; those that had not failed before do now, by `error` of a reward.

    Raises:
        LearnerError: it is one; no further batch could be scored.
    """
    if isinstance(error, LearnerError):
        raise error
    failure = failure_of(error)
    return [
        t.replace(outcome=Outcome.REWARD_ERROR, failure=failure, rewards=())
        if t.outcome in SCORED_OUTCOMES
        else t
        for t in trajectories
    ]


def _scored_places(trajectories: Sequence[Trajectory]) -> list[int]:
    return [place for place, trajectory in enumerate(trajectories) if trajectory.outcome in SCORED_OUTCOMES]


def _replaced(
    trajectories: Sequence[Trajectory], places: Sequence[int], others: Sequence[Trajectory]
) -> list[Trajectory]:
    result = list(trajectories)
    for place, other in zip(places, others, strict=True):
        result[place] = other
    return result
