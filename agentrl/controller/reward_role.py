"""`RewardRole`: scores attempts with the ranks of the run's reward model."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agentrl.cluster.deadlines import CallDeadlines
from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.pools import Seat
from agentrl.cluster.workers import Workers
from agentrl.config.reward_model import RewardModelConfig
from agentrl.controller.conversations import Conversations
from agentrl.data.model_source import resolve_model
from agentrl.errors import ConfigError, concerning
from agentrl.learner.batch import Microbatch, Sample
from agentrl.learner.layout import check_architecture
from agentrl.learner.packing import pack
from agentrl.learner.ranks import Device
from agentrl.learner.reward_model import RewardModel, find_classifier
from agentrl.learner.stored_weights import reading_s
from agentrl.plugins import Attempted, RewardResult


class RewardRole:
    """Scores the attempts of a batch on the ranks of the reward model, packed like a learner's batch."""

    def __init__(
        self, ranks: Workers[RewardModel], conversations: Conversations, config: RewardModelConfig
    ) -> None:
        """ranks: may still be starting; they must be ready before `score` is called."""
        self.ranks = ranks
        self._conversations = conversations
        self._config = config
        # Two terms may score at once: ranks that got their calls in different orders would deadlock.
        self._lock = threading.Lock()

    def score(self, attempts: Sequence[Attempted]) -> list[RewardResult | None]:
        """Return the model's score of each attempt; None for attempts that are not rendered.

        See `Conversations.render` for those.

        Raises:
            ConfigError: the chat template refuses a conversation.
            LearnerError: a rank was lost, failed or did not answer in time.
        """
        rendered = [self._conversations.render(attempt) for attempt in attempts]
        # `pack` takes samples: these have an empty loss mask.
        samples = [
            Sample.supervised(index, one.token_ids, np.zeros(len(one.token_ids), np.bool_))
            for index, one in enumerate(rendered)
            if one is not None
        ]
        scores = self._score(samples) if samples else {}
        return [
            None if one is None else RewardResult(scores[index], {"truncated": float(one.is_truncated)})
            for index, one in enumerate(rendered)
        ]

    def _score(self, samples: Sequence[Sample]) -> dict[int, float]:
        with self._lock:
            shards = pack(
                samples,
                max_tokens=self._config.microbatch_tokens,
                world_size=self.ranks.dp_size,
                parity_tokens=self.ranks.run(RewardModel.parity_tokens),
            )
            microbatches = [microbatch for shard in shards for microbatch in shard]
            scores = self.ranks.run(RewardModel.score, microbatches)
        return dict(_by_index(microbatches, scores))


def launch_reward_model(
    config: RewardModelConfig, seats: Sequence[Seat], *, device: Device
) -> WorkerGroup[RewardModel]:
    """Launch the ranks as Ray actors in their seats, without waiting; see `wait_until_ready`."""
    deadlines = CallDeadlines(
        config.collective_timeout_s,
        "reward_model.collective_timeout_s",
        reading_s=reading_s(Path(config.model.path)),
    )
    return WorkerGroup.launch(
        RewardModel, config, device, seats=seats, name="reward model", deadlines=deadlines
    )


def resolve_reward_model(config: RewardModelConfig) -> RewardModelConfig:
    """Return the config section with hub ids replaced by local folders; unchanged without a reward model.

    Raises:
        ConfigError: the model does not exist, is no classifier with one label, or cannot be computed.
    """
    if not config.is_used:
        return config
    try:
        model = resolve_model(config.model)
    except ConfigError as error:
        raise ConfigError(f"reward_model.{error}") from error
    find_classifier(model)
    with concerning("reward_model"):
        check_architecture(model)
    return config.model_copy(update={"model": model})


def _by_index(
    microbatches: Sequence[Microbatch], scores: Sequence[NDArray[np.floating]]
) -> Iterator[tuple[int, float]]:
    for microbatch, values in zip(microbatches, scores, strict=True):
        if not microbatch.is_filler:
            yield from zip(microbatch.sample_indices.tolist(), values.tolist(), strict=True)
