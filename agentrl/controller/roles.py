"""`Roles`: what a step updates: the policy, and for some algorithms a critic and a KL coefficient.

A checkpoint stores them in:
```
learner/            the policy (DCP)
learner/critic/     the critic (DCP), if there is one
learner/reward_kl.json
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from agentrl.algorithms.aggregation import Aggregation
from agentrl.config.placement import Role
from agentrl.config.schema import Config
from agentrl.controller.learner import call_deadlines, launch_learner, learner_spec, open_local_learner
from agentrl.controller.reward_kl import RewardKL
from agentrl.data.model_source import resolve_model
from agentrl.errors import AgentRLError, CheckpointError, ConfigError
from agentrl.learner.architecture import check_value_head
from agentrl.learner.critic import Critic, CriticSpec, CriticWorker
from agentrl.learner.layout import check_folder
from agentrl.learner.learner import Learner
from agentrl.workers.group import WorkerGroup
from agentrl.workers.pools import Seat
from agentrl.workers.starting import wait_until_all_ready
from agentrl.workers.workers import LocalWorker, Workers

CRITIC_FOLDER = "critic"


@dataclass(frozen=True, slots=True)
class Roles:
    """The workers of each role. critic, reward_kl: None if the algorithm does not use them.

    is_critic_apart: the critic has its own pool, so it can compute in parallel with the policy.
    """

    learner: Workers[Learner]
    critic: Workers[Critic] | None = None
    reward_kl: RewardKL | None = None
    is_critic_apart: bool = False

    @property
    def ranks(self) -> list[Workers[Learner] | Workers[Critic]]:
        """The worker groups of all roles that have ranks."""
        return [self.learner] if self.critic is None else [self.learner, self.critic]

    @property
    def is_lost(self) -> bool:
        """Whether a rank of any role was lost. The ranks of all roles are restarted then."""
        return any(workers.is_lost for workers in self.ranks)

    def start_save(self, folder: str) -> None:
        """Copy the state of all roles and start writing the copies to `folder`.

        If one role fails, no role is left writing.

        Raises:
            CheckpointError: a role could not start its write.
        """
        if self.reward_kl is not None:
            self.reward_kl.save(Path(folder))
        self.learner.run(Learner.start_save, folder)
        if self.critic is not None:
            try:
                self.critic.run(Critic.start_save, str(Path(folder) / CRITIC_FOLDER))
            except CheckpointError:
                with suppress(CheckpointError):  # the critic's error is raised below
                    self.learner.run(Learner.finish_save)
                raise

    def finish_save(self) -> None:
        """Wait until all roles have written, even if one fails.

        May run in another thread than the other methods.
        """
        with ExitStack() as stack:
            if self.critic is not None:
                stack.callback(self.critic.run, Critic.finish_save)
            self.learner.run(Learner.finish_save)

    def save(self, folder: str) -> None:
        self.start_save(folder)
        self.finish_save()

    def load(self, folder: Path) -> None:
        """Load the state of all roles from `folder`.

        Raises:
            CheckpointError: the state is missing, incomplete, or belongs to other models.
        """
        self.learner.run(Learner.load, str(folder))
        if self.reward_kl is not None:
            self.reward_kl.load(folder)
        if self.critic is not None:
            self.critic.run(Critic.load, str(folder / CRITIC_FOLDER))

    def usage(self) -> dict[str, float]:
        """Return the resource usage of all roles by phase since the last call."""
        own = self.learner.run(Learner.usage)
        return own if self.critic is None else own | self.critic.run(Critic.usage)

    def stop(self) -> None:
        """End all ranks."""
        if self.critic is not None:
            self.critic.stop()
        self.learner.stop()


def launch_roles(config: Config, seats: Mapping[Role, Sequence[Seat]], *, num_steps: int, dump_folder: str) -> Roles:
    """Launch all ranks as Ray actors in their seats, without waiting for them (see `wait_until_all_ready`).

    Args:
        config: with `model` resolved to a folder.
        num_steps: steps of the whole run, for the learning rate schedules.
    """
    own = learner_spec(config, total_updates=_policy_updates(config, num_steps), dump_folder=dump_folder)
    learner = launch_learner(own, seats["actor"])
    critic = _launch_critic(config, seats["critic"], num_steps=num_steps, dump_folder=dump_folder) if config.has_critic else None
    is_critic_apart = config.has_critic and config.placement.pool_of("critic") != config.placement.pool_of("actor")
    return Roles(learner, critic, _reward_kl(config), is_critic_apart)


def start_roles(config: Config, seats: Mapping[Role, Sequence[Seat]], *, num_steps: int, dump_folder: str) -> Roles:
    """Launch the roles (see `launch_roles`) and wait until all ranks have built their models.

    Raises:
        ConfigError: a model, device or attention is not available.
        LearnerError: the ranks did not form their process group.
    """
    roles = launch_roles(config, seats, num_steps=num_steps, dump_folder=dump_folder)
    try:
        wait_until_all_ready(roles.ranks)
    except AgentRLError:
        roles.stop()
        raise
    return roles


def _launch_critic(config: Config, seats: Sequence[Seat], *, num_steps: int, dump_folder: str) -> WorkerGroup[Critic]:
    spec = critic_spec(config, num_steps=num_steps, dump_folder=dump_folder)
    deadlines = call_deadlines(spec.learner)
    make: Callable[..., Critic] = CriticWorker
    return WorkerGroup.launch(make, spec, seats=seats, name="critic", deadlines=deadlines, num_replicas=spec.learner.num_replicas)


def open_local_roles(config: Config, *, num_steps: int, dump_folder: str) -> Roles:
    """Return the roles with one rank each in this process: for replays, tests and debuggers."""
    learner = open_local_learner(learner_spec(config, total_updates=_policy_updates(config, num_steps), dump_folder=dump_folder))
    if not config.has_critic:
        return Roles(learner, None, _reward_kl(config))
    spec = critic_spec(config, num_steps=num_steps, dump_folder=dump_folder)
    return Roles(learner, LocalWorker(Critic(spec, learner.worker.place)), _reward_kl(config))


def check_critic(config: Config) -> None:
    """Check before any rank starts that the critic, if the config has one, can be built.

    Raises:
        ConfigError: the model does not exist, its head is not one linear value, or ranks cannot shard it.
    """
    if not config.has_critic:
        return
    try:
        model = resolve_model(config.critic_model)
        check_value_head(model)
        check_folder(model, config.learner)
    except ConfigError as error:
        raise ConfigError(f"critic: {error}") from error


def critic_spec(config: Config, *, num_steps: int, dump_folder: str | None = None) -> CriticSpec:
    """Return the spec that every critic rank gets."""
    algorithm = config.algorithm_in_use
    return CriticSpec(
        resolve_model(config.critic_model),
        config.learner.model_copy(update={"optimizer": config.critic.optimizer}),
        Aggregation(algorithm.aggregation, algorithm.constant_length),
        config.critic.cliprange_value,
        seed=config.trainer.seed,
        total_updates=num_steps * config.learner.minibatches_per_step * config.critic_epochs,
        dump_folder=None if dump_folder is None else str(Path(dump_folder) / CRITIC_FOLDER),
        device=config.placement.device_of("critic"),
    )


def _policy_updates(config: Config, num_steps: int) -> int:
    warmup = config.critic.warmup_steps if config.has_critic else 0
    return max(1, num_steps - warmup) * config.learner.minibatches_per_step * config.learner.epochs_per_step


def _reward_kl(config: Config) -> RewardKL | None:
    kl = config.algorithm.kl
    return RewardKL(kl) if kl.place == "reward" and kl.coefficient > 0 else None
