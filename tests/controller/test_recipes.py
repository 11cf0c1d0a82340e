"""Every packaged recipe composes, and makes updates of a tiny model."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from agentrl.config.compose import load_config
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.config.model import ModelConfig, ModelFromScratchConfig
from agentrl.controller.credit import NOTHING, credit, leave_out_old, whitened
from agentrl.errors import ConfigError
from agentrl.learner.learner import LearnerSpec
from agentrl.learner.packing import pack
from agentrl.types import Group, Trajectory
from parts.columns import assessment_of
from parts.learner import lone_learner
from parts.trajectories import facts, make_trajectory

ROOT = Path(__file__).parents[2]
RECIPES = sorted(file.stem for file in (ROOT / "configs" / "algorithm").glob("*.yaml"))
SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SIZES |= {"intermediate_size": 24, "tie_word_embeddings": True}
GROUP_SIZE = 4


def config_of(recipe: str, *overrides: str):
    return load_config(str(ROOT / "configs" / "quickstart.yaml"), [f"algorithm={recipe}", *overrides])


def trajectory(group: int, member: int, rng: np.random.Generator) -> Trajectory:
    """Prompt, action, tool output, action: what was sampled is near the new model's uniform distribution."""
    mask = np.array([False] * 3 + [True] * int(rng.integers(2, 6)) + [False] * 2 + [True] * 2)
    turns = np.where(mask, np.cumsum(np.diff(mask, prepend=False) & mask) - 1, -1)
    return make_trajectory(
        turns,
        group_id=group,
        member=member,
        task_id=f"t:{group}",
        token_ids=rng.integers(0, SIZES["vocab_size"], len(mask)),
        behavior_logprobs=np.where(mask, -math.log(SIZES["vocab_size"]) + rng.normal(0, 0.3, len(mask)), 0.0),
        version=1,
        reward=float(member % 2),
        anchors=np.arange(2),
    )


def group_of(number: int, rng: np.random.Generator) -> Group:
    members = tuple(trajectory(number, member, rng) for member in range(GROUP_SIZE))
    return Group(number, members, greedy=trajectory(number, GROUP_SIZE, rng).replace(is_greedy=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_learns(recipe):
    config = config_of(recipe, "buffer.max_staleness=2", f"rollout.group_size={GROUP_SIZE}")
    rng = np.random.default_rng(0)
    groups = [group_of(g, rng) for g in range(3)]
    values = (
        [np.zeros(t.num_action_tokens, np.float32) for group in groups for t in group.trajectories]
        if config.has_critic
        else None
    )
    known = facts(*groups)
    assessment = NOTHING if values is None else assessment_of(known, values=values)
    credited = credit(known, config.algorithm, group_size=GROUP_SIZE, assessment=assessment)
    samples = [ref.load() for group in whitened(credited) for ref in group]
    spec = LearnerSpec(
        ModelConfig(),
        LearnerConfig(optimizer=OptimizerConfig(lr=1e-2)),
        config.algorithm_in_use,
        mode=config.policy_mode,
        seed=0,
        temperature=1.0,
        total_updates=2,
        from_scratch=ModelFromScratchConfig(architecture="qwen2", sizes=SIZES),
    )
    with lone_learner(spec) as learner:
        [microbatches] = pack(samples, max_tokens=64, world_size=1)
        scored = learner.score(microbatches)
        updates = [learner.update(scored) for _ in range(2)]
    assert updates[0]["grad_norm"] > 0.0  # the second may lie beyond all clips: those of gspo are very near
    for metrics in updates:
        assert metrics["is_skipped"] == 0.0
        assert all(math.isfinite(value) for value in metrics.values())
    assert abs(updates[1]["ppo_kl"]) > 1e-6  # the first update moved the policy


def test_tokens_older_than_max_lag_leave_the_loss_and_keep_their_advantage():
    config = config_of("grpo", f"rollout.group_size={GROUP_SIZE}")
    rng = np.random.default_rng(0)
    group = Group(0, tuple(trajectory(0, member, rng) for member in range(GROUP_SIZE)))
    first = group.trajectories[0]
    versions = np.where(first.action_mask & (first.turn_ids == 1), 3, first.versions).astype(
        np.int32
    )  # the second turn is newer
    group = Group(0, (first.replace(versions=versions), *group.trajectories[1:]))
    samples = credit(facts(group), config.algorithm, group_size=GROUP_SIZE)
    left = partial(leave_out_old, samples, lags=lambda versions: 4 - versions)
    assert left(max_lag=None) == samples
    masked = [ref.load() for ref in left(max_lag=2)[0]]
    np.testing.assert_array_equal(masked[0].loss_mask, first.action_mask & (first.turn_ids == 1))
    assert not any(sample.loss_mask.any() for sample in masked[1:])
    for before, after in zip(samples[0], masked, strict=True):
        np.testing.assert_array_equal(after.advantages, before.load().advantages)
    whole = [ref.load() for ref in left(max_lag=3)[0]]
    assert all(s.loss_mask.sum() == s.action_mask.sum() for s in whole)


def test_a_recipe_may_be_changed_by_keys_and_named_in_a_file(tmp_path):
    assert config_of("dapo", "algorithm.clip_high=0.3").algorithm.clip_high == 0.3
    (tmp_path / "run.yaml").write_text(
        "defaults: [algorithm: gspo, _self_]\nalgorithm: {clip_high: 1.0e-3}\n"
    )
    config = load_config(str(tmp_path / "run.yaml"))
    assert (config.algorithm.policy_loss, config.algorithm.clip_low, config.algorithm.clip_high) == (
        "gspo",
        3e-4,
        1e-3,
    )
    assert load_config(str(tmp_path / "run.yaml"), ["algorithm=cispo"]).algorithm.policy_loss == "cispo"


def test_a_recipe_that_does_not_exist_is_answered_with_those_that_do():
    with pytest.raises(ConfigError, match="dapo"):
        config_of("dappo")


def test_without_a_recipe_nothing_changes():
    plain = load_config(str(ROOT / "configs" / "quickstart.yaml")).algorithm
    assert (plain.advantage, plain.policy_loss, plain.aggregation) == ("grpo", "ppo_clip", "token_mean")
    assert (plain.correction.weight, plain.correction.cap, plain.correction.reject) == ("token", 2.0, {})
