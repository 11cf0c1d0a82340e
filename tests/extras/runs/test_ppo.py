"""A whole run with a critic on two ranks: its values reach the advantages, and a checkpoint holds it."""

import math

import pytest

import agentrl

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_ray")]


def test_ppo_with_a_critic_on_two_ranks_goes_on_from_its_checkpoint(world):
    run_dir = world.folder / "ppo"

    def run(steps):
        overrides = [
            "algorithm=ppo",
            f"trainer.run_dir={run_dir}",
            f"trainer.steps={steps}",
            "trainer.save_freq=1",
            "learner.world_size=2",
            "critic.optimizer.lr=1e-3",
            "critic.warmup_steps=1",
            "algorithm.bootstrap_truncated=true",
            *(
                "algorithm.kl.coefficient=0.01",
                "algorithm.kl.place=reward",
                "algorithm.kl.estimator=k1",
                "algorithm.kl.target=0.1",
            ),
        ]
        return agentrl.train(agentrl.load_config(str(world.config), overrides))

    assert run(2).step == 2
    assert (run_dir / "checkpoints/step_000002/learner/critic/.metadata").exists()
    result = run(3)
    assert result.step == 3
    assert result.counts.is_balanced
    records = world.records(run_dir).train
    assert [r["step"] for r in records] == [1, 2, 3], "the second call went on"
    assert ["learner/loss" in r for r in records] == [False, True, True], (
        "the critic learns alone in the first step"
    )
    assert all(
        math.isfinite(r["learner/critic/loss"]) and r["learner/critic/num_tokens"] > 0 for r in records
    )
    assert records[0]["learner/reward_kl"] == 0.0, "the policy is still its own reference"
    assert records[1]["learner/reward_kl_coefficient"] < records[0]["learner/reward_kl_coefficient"] == 0.01
