"""The quickstart learns, for three seeds of three: `make test-slow`."""

import json

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns_to_use_the_calculator(world, quickstart, seed):
    run_dir = quickstart / f"seed{seed}"
    command = world.start(
        "train",
        "configs/quickstart.yaml",
        f"data.train_files=[{quickstart}/data/train.parquet]",
        f"data.val_files=[{quickstart}/data/val.parquet]",
        f"model.path={quickstart}/warm_start",
        f"tracking.baselines={{untrained: {quickstart}/untrained}}",
        f"trainer.seed={seed}",
        "eval.n=4",  # 64 rows of each kind alone would be off by 0.04, one time in three
        f"trainer.run_dir={run_dir}",
    )
    assert command.wait(1400) == 0, command.output()
    validation = json.loads((run_dir / "result.json").read_text())["validation"]
    initial, final = validation["initial"], validation["final"]
    assert validation["untrained"]["val/accuracy"] < 0.05, "a baseline is played with its own weights alone"
    assert initial["val/accuracy"] < 0.6
    assert final["val/accuracy"] >= 0.9
    assert min(value for name, value in final.items() if name.startswith("val/accuracy/")) >= 0.85
    assert 0.3 <= initial["val/tool_use/needs_tool"] <= 0.7
    assert final["val/tool_use/needs_tool"] > 0.9
    train = world.records(run_dir).train
    assert 0 < max(r["rollout/lag/max"] for r in train) <= 2
