"""Every recipe learns the quickstart task, for two seeds of two: `make test-slow`. test_dynamic_sampling.py has two steps of each."""

import json

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("recipe", ["ppo", "grpo", "rloo", "reinforce_plus_plus", "dapo", "gspo", "cispo"])
def test_a_recipe_learns_the_quickstart_task(world, quickstart, recipe, seed):
    run_dir = quickstart / f"{recipe}{seed}"
    command = world.start(
        "train",
        "configs/quickstart.yaml",
        f"algorithm={recipe}",
        f"data.train_files=[{quickstart}/data/train.parquet]",
        f"data.val_files=[{quickstart}/data/val.parquet]",
        f"model.path={quickstart}/warm_start",
        "~tracking.baselines.untrained",
        "trainer.save_freq=-1",
        f"trainer.seed={seed}",
        f"trainer.run_dir={run_dir}",
    )
    assert command.wait(1400) == 0, command.output()
    validation = json.loads((run_dir / "result.json").read_text())["validation"]
    assert validation["initial"]["val/accuracy"] < 0.6
    assert validation["final"]["val/accuracy"] >= 0.85
