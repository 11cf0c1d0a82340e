"""What is scored outside of attempts: batches of training, and validations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from agentrl.buffer.training_buffer import TrainingBuffer
from agentrl.chat.chat import Chat
from agentrl.cluster.actors import Actor
from agentrl.cluster.pools import Seat
from agentrl.cluster.workers import Workers
from agentrl.config.placement import Role
from agentrl.config.schema import Config
from agentrl.controller.batch_scorer import RemoteBatchRewards, launch_scorer
from agentrl.controller.conversations import Conversations
from agentrl.controller.reward_role import launch_reward_model
from agentrl.controller.run_dir import RunDir
from agentrl.controller.validation import Validation
from agentrl.data.checked_dataset import Playable, build_dataset
from agentrl.errors import ConfigError
from agentrl.learner.reward_model import RewardModel
from agentrl.plugins import Plugins
from agentrl.rewards.select import RewardTable


@dataclass(frozen=True, slots=True)
class Scoring:
    """What is scored outside of attempts: batches of training, and validations.

    validation: None without `data.val_files`.
    """

    batch_rewards: RemoteBatchRewards
    validation_rewards: RemoteBatchRewards
    validation: Validation | None


def open_scoring(config: Config, run_dir: RunDir, plugins: Plugins, chat: Chat) -> Scoring:
    rewards = _batch_rewards(config, plugins)
    if rewards.is_any and config.needs_early_rewards:
        raise ConfigError(
            f"{config.needs_early_rewards} needs rewards when a group is complete, but a reward with "
            "scope=batch is computed later"
        )
    if config.reward_model.is_used:
        Conversations(config.reward_model, config.agent, plugins)  # raises here what its process would
    own = config.of_validation
    validation_rewards = rewards if own is config else _batch_rewards(own, plugins)
    return Scoring(
        rewards, validation_rewards, _open_validation(own, run_dir, plugins, chat, validation_rewards)
    )


def _batch_rewards(config: Config, plugins: Plugins) -> RemoteBatchRewards:
    return RemoteBatchRewards(is_any=RewardTable(config.reward, plugins).may_score("batch"))


def _open_validation(
    config: Config, run_dir: RunDir, plugins: Plugins, chat: Chat, rewards: RemoteBatchRewards
) -> Validation | None:
    """Return the validation, None without `data.val_files`. `config` and `rewards`: those of validation."""
    if not config.data.val_files:
        return None
    playable = Playable(config.agent, plugins, chat, RewardTable(config.reward, plugins).check)
    dataset = build_dataset(
        config.data,
        config.data.val_files,
        playable,
        max_rows=config.data.max_val_rows,
        images=run_dir.images,
    )
    folder = run_dir.validation_data if config.trainer.keep_trajectories else None
    return Validation(
        dataset, config.eval, rewards=rewards, folder=folder, num_examine=config.reward.num_examine
    )


def start_scorer(
    config: Config,
    scoring: Scoring,
    buffer: Actor[TrainingBuffer],
    seats: Mapping[Role, Sequence[Seat]],
    stack: ExitStack,
) -> list[Workers[RewardModel]]:
    """Launch the scorer of batches and the ranks of the reward model, if there are any; return the ranks.

    `stack` stops them.
    """
    used = [own for own in (scoring.batch_rewards, scoring.validation_rewards) if own.is_any]
    if not used:
        return []
    ranks = None
    if config.reward_model.is_used:
        device = config.placement.device_of("reward_model")
        ranks = launch_reward_model(config.reward_model, seats["reward_model"], device=device)
        stack.callback(ranks.stop)
    scorer = launch_scorer(config, buffer, ranks)
    stack.callback(scorer.kill)
    for rewards in used:
        rewards.connect(scorer)
    return [] if ranks is None else [ranks]
