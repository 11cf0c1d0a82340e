"""The quickstart on two real SGLang servers on a CPU learns as it does on the embedded one: `make
test-sglang`.
"""

import json

import pytest

from sglang_cpu.environment import built_python


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("transport", ["distributed", "disk"])
def test_it_learns_to_use_the_calculator(world, quickstart, transport):
    run_dir = quickstart / f"sglang_{transport}"
    command = world.start(
        "train",
        "configs/quickstart.yaml",
        "server=sglang_cpu",
        f"rollout.sglang.python={built_python()}",
        "rollout.num_servers=2",
        "rollout.server_start_timeout_s=400",
        f"rollout.weights.transport={transport}",
        f"data.train_files=[{quickstart}/data/train.parquet]",
        f"data.val_files=[{quickstart}/data/val.parquet]",
        f"model.path={quickstart}/warm_start",
        "~tracking.baselines.untrained",
        "trainer.test_freq=120",
        "eval.n=4",  # 64 rows of each kind alone would be off by 0.04, one time in three
        f"trainer.run_dir={run_dir}",
    )
    assert command.wait(3500) == 0, command.output()
    result = json.loads((run_dir / "result.json").read_text())
    assert result["balanced"], result
    initial, final = result["validation"]["initial"], result["validation"]["final"]
    assert initial["val/accuracy"] < 0.6
    assert final["val/accuracy"] >= 0.9
    assert min(value for name, value in final.items() if name.startswith("val/accuracy/")) >= 0.85
    assert final["val/tool_use/needs_tool"] > 0.9
    train = world.records(run_dir).train
    assert 0 < max(r["rollout/lag/max"] for r in train) <= 2
    # Server and learner agree on tokens of the newest weights; what is older than they are differs by what
    # was learned since.
    assert max(r["learner/mismatch_mean"] for r in train) < 0.2
