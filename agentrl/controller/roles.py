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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.pools import Seat
from agentrl.cluster.starting import wait_until_all_ready
from agentrl.cluster.workers import LocalWorker, Workers
from agentrl.config.placement import Role
from agentrl.controller.learner import call_deadlines, launch_learner, open_local_learner
from agentrl.controller.reward_kl import RewardKL
from agentrl.controller.specs import CRITIC_FOLDER, RoleSpecs
from agentrl.data.checkpoint_files import StoredFile
from agentrl.errors import AgentRLError, CheckpointError
from agentrl.learner.critic import Critic, CriticSpec, CriticWorker
from agentrl.learner.learner import Learner


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

    def finish_save(self) -> list[StoredFile]:
        """Wait until all roles have written, even if one fails; return the files that the ranks wrote.

        May run in another thread than the other methods.
        """
        try:
            written = self.learner.run(Learner.finish_save)
        finally:
            of_critic = self.critic.run(Critic.finish_save) if self.critic is not None else []
        return [*written, *(file.below(CRITIC_FOLDER) for file in of_critic)]

    def save(self, folder: str) -> list[StoredFile]:
        self.start_save(folder)
        return self.finish_save()

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

    def give_back_memory(self) -> None:
        """Free GPU memory that the ranks keep but do not use, for servers on the same GPUs."""
        self.learner.run(Learner.give_back_memory)
        if self.critic is not None:
            self.critic.run(Critic.give_back_memory)

    def stop(self) -> None:
        """End all ranks."""
        if self.critic is not None:
            self.critic.stop()
        self.learner.stop()


def launch_roles(specs: RoleSpecs, seats: Mapping[Role, Sequence[Seat]]) -> Roles:
    """Launch all ranks as Ray actors in their seats, without waiting for them (see
    `wait_until_all_ready`).
    """
    learner = launch_learner(specs.learner, seats["actor"])
    critic = None if specs.critic is None else _launch_critic(specs.critic, seats["critic"])
    return Roles(learner, critic, _reward_kl(specs), specs.is_critic_apart)


def start_roles(specs: RoleSpecs, seats: Mapping[Role, Sequence[Seat]]) -> Roles:
    """Launch the roles (see `launch_roles`) and wait until all ranks have built their models.

    Raises:
        ConfigError: a model, device or attention is not available.
        LearnerError: the ranks did not form their process group.
    """
    roles = launch_roles(specs, seats)
    try:
        wait_until_all_ready(roles.ranks)
    except AgentRLError:
        roles.stop()
        raise
    return roles


def open_local_roles(specs: RoleSpecs) -> Roles:
    """Return the roles with one rank each in this process: for replays, tests and debuggers."""
    learner = open_local_learner(specs.learner)
    critic = None if specs.critic is None else LocalWorker(Critic(specs.critic, learner.worker.place))
    return Roles(learner, critic, _reward_kl(specs))


def _launch_critic(spec: CriticSpec, seats: Sequence[Seat]) -> WorkerGroup[Critic]:
    make: Callable[..., Critic] = CriticWorker
    deadlines = call_deadlines(spec.learner, spec.model)
    return WorkerGroup.launch(
        make, spec, seats=seats, name="critic", deadlines=deadlines, num_replicas=spec.learner.num_replicas
    )


def _reward_kl(specs: RoleSpecs) -> RewardKL | None:
    return None if specs.reward_kl is None else RewardKL(specs.reward_kl)
