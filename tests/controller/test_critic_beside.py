"""The critic's updates beside the policy's: begun before them, waited for behind them, and the same numbers
as one after the other.
"""

from contextlib import closing, nullcontext

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from agentrl.cluster.workers import Handle, LocalWorker
from agentrl.config.schema import Config
from agentrl.controller.roles import Roles, open_local_roles
from agentrl.controller.specs import RoleSpecs
from agentrl.controller.train import learn
from agentrl.errors import LearnerError
from agentrl.learner.critic import Critic
from agentrl.learner.learner import Learner
from agentrl.types import Group
from parts.learner import tiny_sizes
from parts.trajectories import facts, make_trajectory

VOCABULARY = 31


class Elsewhere(LocalWorker):
    """Ranks of which the driver sees nothing before it waits: calls are made then, in the order in which they
    were begun.
    """

    def __init__(self, worker, events):
        super().__init__(worker)
        self.queue, self.events = [], events

    def begin(self, method, /, *args, **kwargs):
        call = Call(self, lambda: super(Elsewhere, self).begin(method, *args, **kwargs).wait())
        self.queue.append(call)
        self.events.append(f"begin {method.__name__}")
        return call


class Call(Handle):
    def __init__(self, ranks, make):
        self.ranks, self.make, self.results = ranks, make, []

    def wait(self):
        while not self.results:
            first = self.ranks.queue.pop(0)
            first.results.append(first.make())
        if self.ranks.events[-1] != "waited":
            self.ranks.events.append("waited")
        return self.results[0]


def groups():
    rng = np.random.default_rng(0)

    def attempt(group, member):
        turns = np.array([-1] * 3 + [0] * int(rng.integers(2, 6)))
        return make_trajectory(
            turns,
            group_id=group,
            member=member,
            token_ids=rng.integers(0, VOCABULARY, len(turns)),
            behavior_logprobs=np.where(turns < 0, 0.0, -np.log(VOCABULARY)),
            reward=float(member % 2),
        )

    return facts(*(Group(group, tuple(attempt(group, member) for member in range(4))) for group in range(2)))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen2Config(**tiny_sizes(VOCABULARY))).save_pretrained(folder)
    return Config.model_validate(
        {
            "model": {"path": str(folder)},
            "algorithm": {"advantage": "gae"},
            "rollout": {"group_size": 4},
            "learner": {
                "minibatches_per_step": 2,
                "epochs_per_step": 2,
                "microbatch_tokens": 24,
                "optimizer": {"lr": 1e-2},
            },
            "critic": {"optimizer": {"lr": 1e-2}, "warmup_steps": 1},
        }
    )


def steps(config, folder, *, is_apart):
    """Learn two steps, the first of the critic alone; return the metrics, weights, phases, and what the
    driver asked of the critic.
    """
    phases, events = [], []

    def timer(phase):
        phases.append(phase)
        events.append(phase)
        return nullcontext()

    local = open_local_roles(RoleSpecs.of(config, num_steps=2, dump_folder=str(folder)))
    with closing(local.learner.worker):
        critic = Elsewhere(local.critic.worker, events) if is_apart else local.critic
        roles = Roles(local.learner, critic, is_critic_apart=is_apart)
        metrics = [
            learn(roles, groups(), config, step=step, lags=np.zeros_like, timer=timer) for step in range(2)
        ]
        return (
            metrics,
            roles.learner.run(Learner.checksums),
            local.critic.run(Critic.checksums),
            phases,
            events,
        )


def test_the_numbers_are_those_of_one_after_the_other(config, tmp_path):
    *beside, _, events = steps(config, tmp_path, is_apart=True)
    *after, phases, _ = steps(config, tmp_path, is_apart=False)
    assert beside == after
    warmup, step = beside[0]
    assert ["loss" in metrics for metrics in warmup] == [False] * 4
    assert sum("loss" in metrics for metrics in step) == 4
    assert phases == [
        "assess",
        "credit",
        "update_critic",
        "assess",
        "credit",
        "update_critic",
        "score",
        "update",
        "update_critic",
    ]
    asked = ["begin parity_tokens", "waited"] * 2 + ["begin update"] * 4
    assert events[-13:] == ["update_critic", *asked, "score", "update", "update_critic", "waited"]


def test_a_critic_that_is_lost_meanwhile_ends_the_step(config, tmp_path):
    class Lost(Elsewhere):
        def begin(self, method, /, *args, **kwargs):
            if method is not Critic.update:
                return super().begin(method, *args, **kwargs)
            return Gone()

    class Gone(Handle):
        def wait(self):
            raise LearnerError("critic rank 0 was lost during 'update'")

    local = open_local_roles(RoleSpecs.of(config, num_steps=2, dump_folder=str(tmp_path)))
    with closing(local.learner.worker):
        roles = Roles(local.learner, Lost(local.critic.worker, [""]), is_critic_apart=True)
        with pytest.raises(LearnerError, match=r"^critic rank 0 was lost during 'update'$"):
            learn(roles, groups(), config, step=1, lags=np.zeros_like, timer=lambda _: nullcontext())
