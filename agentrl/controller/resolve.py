"""What is checked and resolved before anything of a run starts: a user's error costs no start-up."""

from __future__ import annotations

from agentrl.algorithms.linear_kernels import check_linear_kernels
from agentrl.algorithms.logprob_kernels import check_kernels
from agentrl.algorithms.registry import find_estimator
from agentrl.buffer.training_buffer import TaskCheck, planned_steps
from agentrl.chat.chat import Chat
from agentrl.cluster.seats import check_nsight
from agentrl.cluster.user_files import check_files
from agentrl.config.schema import Config
from agentrl.controller.reward_role import resolve_reward_model
from agentrl.controller.specs import check_critic
from agentrl.controller.teacher import check_teacher
from agentrl.data.checked_dataset import OfferedTools, Playable, check_training_data
from agentrl.data.model_source import resolve_model
from agentrl.data.storage import with_local_files
from agentrl.errors import concerning
from agentrl.learner.architecture import check_dtype, check_head_on_sglang, check_policy, check_replay
from agentrl.learner.layout import check_folder
from agentrl.learner.policy_loss import bind_policy_loss
from agentrl.plugins import Plugins
from agentrl.rewards.select import RewardTable
from agentrl.rollout.frozen_models import resolve_opponents, resolve_teacher
from agentrl.rollout.openai_door import check_address
from agentrl.servers.launch import check_backend


def resolved(config: Config) -> Config:
    """Return the config with its models and data files resolved, after all checks that need no process."""
    check_files(config.models, config.agent)
    if config.cluster.address is None:  # else each process checks its own node when it starts
        check_address(config.agent.gateway)
        for servers in (config.rollout, *(plan.rollout for plan in config.frozen_plans)):
            check_backend(servers)
    config = config.model_copy(
        update={
            "data": with_local_files(config.data),
            "model": resolve_model(config.model),
            "reward_model": resolve_reward_model(config.reward_model),
        }
    )
    config = _with_frozen_models(config)
    config = config.with_adapter_resolved
    check_nsight(config.profiler.nsight)
    with concerning("algorithm.advantage"):
        find_estimator(config.algorithm.advantage)
    with concerning("algorithm.policy_loss"):
        bind_policy_loss(config.algorithm)
    check_policy(config.model)
    check_dtype(config.model)
    check_folder(config.model, config.learner)
    if config.rollout.replay_experts:
        check_replay(config.model)
    if config.rollout.backend == "sglang":
        check_head_on_sglang(config.model)
    check_kernels(config.learner.logprob_kernels, device=config.placement.device_of("actor"))
    with concerning("learner.linear_kernels"):
        check_linear_kernels(config.learner.linear_kernels, device=config.placement.device_of("actor"))
    if config.has_critic:
        check_critic(config.critic_model, config.model, config.learner)
    if config.teacher_model is not None:
        check_teacher(config.teacher_model, config.model, config.learner)
    return config


def _with_frozen_models(config: Config) -> Config:
    """Return the config with the local folders of opponents and teacher, all of which have the policy's
    tokenizer.
    """
    algorithm, policy = config.algorithm, config.model
    if not config.trainer.val_only:
        distillation = resolve_teacher(algorithm.distillation, policy)
        algorithm = algorithm.model_copy(update={"distillation": distillation})
    agent = resolve_opponents(config.agent, policy)
    config = config.model_copy(update={"agent": agent, "algorithm": algorithm})
    for plan in config.frozen_plans:
        with concerning(plan.key):
            check_policy(plan.model)
    return config


def check_training(config: Config, plugins: Plugins, chat: Chat) -> int:
    """Check training data and chat template early: the replay buffer would refuse them after the start-up.

    Returns the number of steps, if no row turns out to be too long.
    """
    offered = OfferedTools(config.agent, plugins)
    rewards = RewardTable(config.reward, plugins)
    rewards.check_services()
    check = TaskCheck(rewards.check, offered, plugins)
    num_rows = check_training_data(config.data, Playable(config.agent, plugins, chat, check))
    return planned_steps(config.trainer, num_tasks=num_rows, groups_per_step=config.buffer.groups_per_step)
