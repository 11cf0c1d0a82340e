"""A whole run in which rewards fail and attempts are masked: groups shrink, the rest is learned from, and a
replay does the same.
"""

from pathlib import Path

import pytest
from safetensors.numpy import load_file

import agentrl
from agentrl.extras.research.replay import load_replay_config, replay
from agentrl.extras.research.stored_steps import StoredSteps
from agentrl.types import SCORED_OUTCOMES, Outcome

pytestmark = pytest.mark.slow

STEPS, LEAST = 2, 2


@pytest.fixture(scope="module", params=["shrink", "mask"])
def run(request, world, tmp_path_factory: pytest.TempPathFactory):
    """A third of all answers cannot be scored; those that were cut are masked."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "fragile.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if len(solution_str) % 3 == 0:\n"
        "        raise OSError('no grader')\n"
        "    return float(len(solution_str) % 2)\n"
    )
    table = f"{{reward_error: {request.param}, truncated: mask}}"
    overrides = [f"rollout.on_outcome={table}", "rollout.group_size=4", f"rollout.min_group_size={LEAST}"]
    overrides += [
        f"reward.custom_function.path={folder}/fragile.py",
        f"trainer.run_dir={folder}/run",
        f"trainer.steps={STEPS}",
    ]
    return request.param, agentrl.train(agentrl.load_config(str(world.config), overrides))


def test_groups_shrink_and_the_run_goes_on(run, world):
    policy, result = run
    assert result.step == STEPS
    assert result.counts.is_balanced
    stored = StoredSteps.find(result.run_dir)
    members = [group.trajectories for step in range(1, STEPS + 1) for group in stored.read(step).groups]
    rewarded = [sum(t.outcome in SCORED_OUTCOMES for t in group) for group in members]
    assert set(rewarded) <= {2, 3, 4}
    assert min(rewarded) < 4
    assert {len(group) for group in members} == ({4} if policy == "mask" else set(rewarded))
    failed = [t for group in members for t in group if t.outcome not in SCORED_OUTCOMES]
    assert {t.outcome for t in failed} == ({Outcome.REWARD_ERROR} if policy == "mask" else set())
    assert all(t.rewards == () for t in failed)
    records = world.records(result.run_dir).train
    assert sum(record["rollout/masked" if policy == "mask" else "rollout/left_out"] for record in records) > 0
    learned = sum(t.outcome in SCORED_OUTCOMES - {Outcome.TRUNCATED} for group in members for t in group)
    assert sum(record["learner/num_sequences"] for record in records) == learned


def test_a_replay_learns_the_same(run, tmp_path):
    _, result = run
    replayed = replay(result.run_dir, load_replay_config(result.run_dir, out=tmp_path), report=True)
    assert weights(replayed.model_path) == weights(result.model_path)
    assert replayed.report is not None


def weights(folder: Path) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in load_file(folder / "model.safetensors").items()}
