"""A run with LoRA on two ranks: servers get the adapter alone, and compute what the learner computes."""

import pytest
from safetensors.torch import load_file

import agentrl
from agentrl.data.trajectories import decode, read_parquet


@pytest.mark.slow
def test_a_run_publishes_adapters_alone(world):
    run_dir = world.folder / "lora"
    config = agentrl.load_config(
        str(world.config),
        [
            f"trainer.run_dir={run_dir}",
            "trainer.steps=2",
            f"data.val_files=[{world.folder}/data/val.parquet]",
            "trainer.test_freq=2",
            "model.lora={rank: 4, alpha: 64}",
            "learner.world_size=2",
            "learner.optimizer.lr=0.05",
            "algorithm.kl.coefficient=0.01",
            # a random model earns no reward: this is what it learns from
            "algorithm.entropy_coefficient=1.0",
            "buffer.max_staleness=0",
            "rollout.weights.adapter=alone",
            "rollout.weights.verify=true",
        ],
    )
    result = agentrl.train(config)

    assert result.step == 2
    assert result.counts.is_balanced
    assert list(result.validation) == ["initial", "final"]
    records = world.records(run_dir).train
    # The second step was sampled with a trained adapter, which changed the policy: server and learner must
    # still agree.
    assert all(record["learner/mismatch_max"] < 1e-4 for record in records)
    assert records[1]["learner/kl"] > 1e-6
    adapter = load_file(run_dir / f"weights/v{result.version:06d}/adapter_model.safetensors")
    size = sum(tensor.nbytes for tensor in adapter.values())
    assert [record["publish/bytes"] for record in records] == [size, size]
    assert (
        size
        < sum(tensor.nbytes for tensor in load_file(result.model_path / "model.safetensors").values()) / 3
    )
    played = [
        t for step in (1, 2) for t in decode(read_parquet(run_dir / f"trajectories/step_{step:06d}.parquet"))
    ]
    assert {int(v) for t in played for v in t.versions[t.action_mask]} == {0, 1}
