"""The specs of the ranks that a step updates: which parts of the config each role gets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentrl.algorithms.aggregation import Aggregation
from agentrl.config.algorithm import KLConfig
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig
from agentrl.config.schema import Config
from agentrl.data.model_source import resolve_model
from agentrl.errors import ConfigError
from agentrl.learner.architecture import check_value_head
from agentrl.learner.critic import CriticSpec
from agentrl.learner.layout import check_folder
from agentrl.learner.learner import LearnerSpec

CRITIC_FOLDER = "critic"


@dataclass(frozen=True, slots=True)
class RoleSpecs:
    """The spec of each role. critic, reward_kl: None if the algorithm does not use them.

    is_critic_apart: the critic has its own pool.
    """

    learner: LearnerSpec
    critic: CriticSpec | None
    reward_kl: KLConfig | None
    is_critic_apart: bool

    @classmethod
    def of(cls, config: Config, *, num_steps: int, dump_folder: str) -> RoleSpecs:
        """Return the specs of a run.

        Args:
            config: with `model` resolved to a folder.
            num_steps: steps of the whole run, for the learning rate schedules.
            dump_folder: where ranks write batches with a non-finite loss.
        """
        warmup = config.critic.warmup_steps if config.has_critic else 0
        updates = max(1, num_steps - warmup) * config.learner.minibatches_per_step * config.learner.epochs_per_step
        kl = config.algorithm.kl
        return cls(
            learner_spec(config, total_updates=updates, dump_folder=dump_folder),
            _critic_spec(config, num_steps=num_steps, dump_folder=dump_folder) if config.has_critic else None,
            kl if kl.place == "reward" and kl.coefficient > 0 else None,
            config.has_critic and config.placement.pool_of("critic") != config.placement.pool_of("actor"),
        )


def learner_spec(config: Config, *, total_updates: int, dump_folder: str | None = None) -> LearnerSpec:
    """Return the spec that every learner rank of this config gets."""
    return LearnerSpec(
        config.model,
        config.learner,
        config.algorithm_in_use,
        config.policy_mode,
        config.trainer.seed,
        config.rollout.temperature,
        total_updates,
        dump_folder,
        device=config.placement.device_of("actor"),
    )


def _critic_spec(config: Config, *, num_steps: int, dump_folder: str) -> CriticSpec:
    algorithm = config.algorithm_in_use
    return CriticSpec(
        resolve_model(config.critic_model),
        config.learner.model_copy(update={"optimizer": config.critic.optimizer}),
        Aggregation(algorithm.aggregation, algorithm.constant_length),
        config.critic.cliprange_value,
        seed=config.trainer.seed,
        total_updates=num_steps * config.learner.minibatches_per_step * config.critic_epochs,
        dump_folder=str(Path(dump_folder) / CRITIC_FOLDER),
        device=config.placement.device_of("critic"),
    )


def check_critic(model: ModelConfig, learner: LearnerConfig) -> None:
    """Check before any rank starts that a critic can be built from `model`.

    Raises:
        ConfigError: the model does not exist, its head is not one linear value, or ranks cannot shard it.
    """
    try:
        model = resolve_model(model)
        check_value_head(model)
        check_folder(model, learner)
    except ConfigError as error:
        raise ConfigError(f"critic: {error}") from error
