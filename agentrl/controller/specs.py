"""The specs of the ranks that a step updates: which parts of the config each role gets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentrl.algorithms.aggregation import Aggregation
from agentrl.config.algorithm import KLConfig
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig
from agentrl.config.model_kind import sees_images
from agentrl.config.proximal import score_reasons
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
        learner, critic, kl, algorithm = (
            config.learner,
            config.critic,
            config.algorithm.kl,
            config.algorithm_in_use,
        )
        steps_of_policy = max(1, num_steps - (critic.warmup_steps if config.has_critic else 0))
        of_learner = LearnerSpec(
            config.model,
            learner,
            algorithm,
            config.policy_mode,
            config.trainer.seed,
            config.rollout.temperature,
            total_updates=steps_of_policy * learner.minibatches_per_step * learner.epochs_per_step,
            dump_folder=dump_folder,
            device=config.placement.device_of("actor"),
            scores_ahead=bool(score_reasons(config)),
            teacher=None if config.teacher_model is None else resolve_model(config.teacher_model),
        )
        if not config.has_critic:
            return cls(of_learner, None, _in_reward(kl), is_critic_apart=False)
        of_critic = CriticSpec(
            resolve_model(config.critic_model),
            learner.model_copy(update={"optimizer": critic.optimizer}),
            Aggregation(algorithm.aggregation, algorithm.constant_length),
            critic.cliprange_value,
            seed=config.trainer.seed,
            total_updates=num_steps * learner.minibatches_per_step * config.critic_epochs,
            dump_folder=str(Path(dump_folder) / CRITIC_FOLDER),
            device=config.placement.device_of("critic"),
        )
        is_apart = config.placement.pool_of("critic") != config.placement.pool_of("actor")
        return cls(of_learner, of_critic, _in_reward(kl), is_apart)


def _in_reward(kl: KLConfig) -> KLConfig | None:
    return kl if kl.place == "reward" and kl.coefficient > 0 else None


def check_critic(model: ModelConfig, policy: ModelConfig, learner: LearnerConfig) -> None:
    """Check before any rank starts that a critic of `policy`, a resolved model, can be built from `model`.

    Raises:
        ConfigError: the model does not exist, its head is not one linear value, ranks cannot shard it, or the
            policy sees images.
    """
    if policy.path and sees_images(Path(policy.path)):
        raise ConfigError(
            f"the policy (model.path={policy.path!r}) sees images, and critics do not; use an estimator "
            "without a critic, such as algorithm.advantage=grpo"
        )
    try:
        model = resolve_model(model)
        check_value_head(model)
        check_folder(model, learner)
    except ConfigError as error:
        raise ConfigError(f"critic: {error}") from error
