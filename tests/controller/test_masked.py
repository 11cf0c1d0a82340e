"""What is masked teaches by its reward alone, what failed teaches nothing, and groups may differ in size:
whole steps of learning.
"""

from contextlib import closing, nullcontext

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from agentrl.config.schema import Config
from agentrl.controller.roles import open_local_roles
from agentrl.controller.specs import RoleSpecs
from agentrl.controller.train import learn
from agentrl.learner.critic import Critic
from agentrl.learner.learner import Learner
from agentrl.types import Group, Outcome, Trajectory
from parts.learner import tiny_sizes
from parts.trajectories import facts, make_trajectory

VOCABULARY = 31
MASKED, FAILED = Outcome.TRUNCATED, Outcome.TIMEOUT
FINE = (Outcome.COMPLETED,) * 3
REWARDS = (1.0, 0.0, 0.0)


def attempt(group: int, member: int, outcome: Outcome, reward: float, *, seed: int = 0) -> Trajectory:
    rng = np.random.default_rng((group, member, seed))
    turns = np.array([-1] * 3 + [0] * int(rng.integers(2, 6)))
    return make_trajectory(
        turns,
        group_id=group,
        member=member,
        token_ids=rng.integers(0, VOCABULARY, len(turns)),
        behavior_logprobs=np.where(turns < 0, 0.0, -np.log(VOCABULARY)),
        reward=None if outcome is FAILED else reward,
        outcome=outcome,
    )


def groups(*others: Trajectory) -> list[Group]:
    """Two groups of three attempts; the first has `others` beside."""
    plain = [[attempt(g, m, FINE[m], REWARDS[m - g]) for m in range(3)] for g in range(2)]
    return [Group(0, (*plain[0], *others)), Group(1, tuple(plain[1]))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("policy")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen2Config(**tiny_sizes(VOCABULARY))).save_pretrained(path)
    return str(path)


def config(folder: str, advantage: str = "grpo", **algorithm) -> Config:
    return Config.model_validate(
        {
            "model": {"path": folder},
            "algorithm": {"advantage": advantage, **algorithm},
            "rollout": {"group_size": 4, "on_outcome": {"truncated": "mask", "timeout": "mask"}},
            "learner": {"microbatch_tokens": 24, "optimizer": {"lr": 1e-2}, "minibatches_per_step": 2},
            "critic": {"optimizer": {"lr": 1e-2}},
        }
    )


def learned(config: Config, tmp_path, batch: list[Group]):
    """Return the checksums of what a step of learning from `batch` makes, and the metrics of its updates."""
    local = open_local_roles(RoleSpecs.of(config, num_steps=1, dump_folder=str(tmp_path)))
    with closing(local.learner.worker):
        metrics = learn(
            local, facts(*batch), config, step=0, lags=np.zeros_like, timer=lambda _: nullcontext()
        )
        critic = None if local.critic is None else local.critic.run(Critic.checksums)
        return (local.learner.run(Learner.checksums), critic), metrics


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean"])
def test_the_tokens_of_a_masked_attempt_change_nothing_and_its_reward_does(folder, tmp_path, aggregation):
    own = config(folder, aggregation=aggregation)
    one, metrics = learned(own, tmp_path, groups(attempt(0, 3, MASKED, 0.0)))
    other, _ = learned(own, tmp_path, groups(attempt(0, 3, MASKED, 0.0, seed=1)))
    assert one == other
    assert sum(update.get("num_sequences", 0.0) for update in metrics) == 6
    better, _ = learned(own, tmp_path, groups(attempt(0, 3, MASKED, 1.0)))
    assert better != one


def test_a_critic_learns_nothing_from_a_masked_attempt(folder, tmp_path):
    own = config(folder, "gae")
    alone, _ = learned(own, tmp_path, groups())
    for reward in (0.0, 1.0):
        assert learned(own, tmp_path, groups(attempt(0, 3, MASKED, reward)))[0] == alone


def test_a_failed_attempt_is_as_if_it_were_not_there(folder, tmp_path):
    """The other group has three members, this one four: sizes differ, and a failure is no reward of 0."""
    alone, _ = learned(config(folder), tmp_path, groups())
    assert learned(config(folder), tmp_path, groups(attempt(0, 3, FAILED, 0.0)))[0] == alone
    assert learned(config(folder), tmp_path, groups(attempt(0, 3, Outcome.COMPLETED, 0.0)))[0] != alone


def test_a_batch_of_masked_attempts_alone_changes_no_weight(folder, tmp_path):
    """Its updates are made and skipped: the schedule of the learning rate goes on."""
    local = open_local_roles(RoleSpecs.of(config(folder), num_steps=1, dump_folder=str(tmp_path)))
    with closing(local.learner.worker):
        before = local.learner.run(Learner.checksums)
    batch = [Group(g, tuple(attempt(g, m, MASKED, REWARDS[m]) for m in range(3))) for g in range(2)]
    (after, _), metrics = learned(config(folder), tmp_path, batch)
    assert after == before
    assert [update["is_skipped"] for update in metrics if "is_skipped" in update] == [1.0, 1.0]
