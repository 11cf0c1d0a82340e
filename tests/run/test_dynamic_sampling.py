"""Groups without variance are replaced, in a whole run."""

import pytest

import agentrl
from agentrl.config.schema import BufferConfig
from agentrl.controller.run import check_variance
from agentrl.data.trajectories import decode, read_parquet
from agentrl.errors import InfrastructureError


def test_dapo_learns_from_groups_with_variance_alone(world, tmp_path):
    (tmp_path / "parity.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return float(len(solution_str) % 2)\n"
    )
    run_dir = world.folder / "dapo"
    overrides = ["algorithm=dapo", f"trainer.run_dir={run_dir}", "trainer.steps=2", f"reward.custom_function.path={tmp_path}/parity.py"]
    config = agentrl.load_config(str(world.config), [*overrides, "reward.terms.length_penalty.weight=0"])
    result = agentrl.train(config)
    assert result.step == 2
    assert result.counts.is_balanced
    assert result.counts.consumed == 2 * config.buffer.groups_per_step
    for step in (1, 2):
        earned: dict[int, set[float]] = {}
        for trajectory in decode(read_parquet(run_dir / f"trajectories/step_{step:06d}.parquet")):
            earned.setdefault(trajectory.group_id, set()).add(trajectory.reward)
        assert all(rewards == {0.0, 1.0} for rewards in earned.values())  # half of all groups of two would not differ


def test_a_run_whose_rewards_never_differ_ends_and_says_why():
    buffer = BufferConfig(groups_per_step=4, max_constant_batches=2)
    check_variance(7, buffer)
    with pytest.raises(InfrastructureError, match=r"8 groups without variance .* too easy or too hard"):
        check_variance(8, buffer)
