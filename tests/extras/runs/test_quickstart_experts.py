"""A mixture of experts, divided over two ranks, learns the quickstart's task, with the experts that the
servers chose: `make test-slow`.
"""

import json

import pytest


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_it_learns_with_replayed_experts(world, quickstart):
    folder = quickstart / "experts"
    sft = world.start(
        "sft",
        "configs/quickstart_experts_sft.yaml",
        f"data.train_files=[{quickstart}/data/sft.parquet]",
        f"trainer.output={folder}/warm_start",
        f"trainer.untrained_output={folder}/untrained",
    )
    assert sft.wait(900) == 0, sft.output()
    run_dir = folder / "run"
    train = world.start(
        "train",
        "configs/quickstart_experts.yaml",
        f"data.train_files=[{quickstart}/data/train.parquet]",
        f"data.val_files=[{quickstart}/data/val.parquet]",
        f"model.path={folder}/warm_start",
        f"tracking.baselines={{untrained: {folder}/untrained}}",
        "learner.world_size=2",
        "learner.expert_parallel=2",
        "eval.n=4",
        f"trainer.run_dir={run_dir}",
    )
    assert train.wait(1400) == 0, train.output()
    validation = json.loads((run_dir / "result.json").read_text())["validation"]
    assert validation["initial"]["val/accuracy"] < 0.7
    assert validation["final"]["val/accuracy"] >= 0.9
    steps = world.records(run_dir).train
    # Only the last token of a segment has no experts, and the servers compute in the same dtype.
    assert min(step["learner/router/replayed"] for step in steps) > 0.9
    assert min(step["learner/router/agreement"] for step in steps) > 0.9
    assert max(step["learner/router/busiest"] for step in steps) < 4
