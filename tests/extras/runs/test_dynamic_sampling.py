"""A whole run that replaces groups without variance and plays a greedy attempt beside each group; what it
stored is replayed.
"""

import math
from pathlib import Path

import numpy as np
import pytest

import agentrl
from agentrl.config.buffer import BufferConfig
from agentrl.controller.batches import check_variance
from agentrl.controller.credit import group_attempts
from agentrl.data.trajectories import decode, read_parquet
from agentrl.errors import InfrastructureError
from agentrl.extras.research.replay import load_replay_config, replay
from agentrl.extras.research.stored_steps import StoredSteps
from agentrl.tracking.metrics import read_metrics

CONFIGS = Path(__file__).parents[3] / "configs"
ALGORITHMS = sorted(file.stem for file in (CONFIGS / "algorithm").glob("*.yaml"))
RECIPES = sorted(file.stem for file in (CONFIGS / "recipes").glob("*.yaml"))


@pytest.fixture(scope="module")
def run(world, tmp_path_factory: pytest.TempPathFactory):
    """DAPO with the greedy attempt as the baseline, and a reward that random answers differ in: their length
    is even or odd.
    """
    folder = tmp_path_factory.mktemp("dapo")
    (folder / "parity.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return "
        "float(len(solution_str) % 2)\n"
    )
    overrides = [
        "algorithm=dapo",
        "algorithm.advantage=remax",
        f"trainer.run_dir={folder}/run",
        "trainer.steps=2",
    ]
    overrides += [
        "rollout.group_size=4"
    ]  # of two attempts that differ from the greedy one, both may have earned the same
    overrides += ["data.curriculum.by_pass_rate=true"]
    overrides += [f"reward.custom_function.path={folder}/parity.py", "reward.terms.length_penalty.weight=0"]
    config = agentrl.load_config(str(world.config), overrides)
    return config, agentrl.train(config)


def stored_groups(result, step):
    return group_attempts(decode(read_parquet(result.run_dir / f"trajectories/step_{step:06d}.parquet")))


def test_only_groups_with_variance_are_learned_from(run):
    config, result = run
    assert result.step == 2
    assert result.counts.is_balanced
    assert result.counts.consumed == 2 * config.buffer.groups_per_step
    for step in (1, 2):  # one in eight of all fours would not differ
        assert all({t.reward for t in group.attempts} == {0.0, 1.0} for group in stored_groups(result, step))


def test_each_group_has_its_greedy_attempt_and_metrics_are_of_the_others(run, world):
    config, result = run
    for step, record in enumerate(world.records(result.run_dir).train, 1):
        groups = stored_groups(result, step)
        sampled = [t.reward for group in groups for t in group.trajectories]
        assert (
            len(sampled)
            == record["rollout/trajectories"]
            == config.buffer.groups_per_step * config.rollout.group_size
        )
        assert record["rollout/reward_mean"] == pytest.approx(np.mean(sampled))
        assert all(group.greedy is not None and group.greedy.is_greedy for group in groups)
        assert record["rollout/greedy_reward_mean"] == np.mean([group.greedy.reward for group in groups])


def test_the_curriculum_hears_of_all_complete_groups_and_of_no_greedy_attempt(run, world):
    config, result = run
    records = world.records(result.run_dir).train
    learned = result.counts.consumed * config.rollout.group_size
    dropped = result.counts.dropped.get("no_variance", 0) * config.rollout.group_size
    assert learned <= sum(record["curriculum/num_attempts"] for record in records) <= learned + dropped
    assert all(0.0 < record["curriculum/visited"] <= 1.0 for record in records)
    [share] = {name for name in records[0] if name.startswith("curriculum/share/")}
    assert records[0][share] == 1.0


def test_each_turn_has_its_anchor_and_members_begin_in_the_same_state(run):
    for group in StoredSteps.find(run[1].run_dir).read(1).groups:
        attempts = [facts.load() for facts in group.attempts]
        assert all(len(t.anchors) == t.turn_ids.max() + 1 for t in attempts)
        assert len({t.anchors[0] for t in group.attempts}) == 1


def test_published_versions_are_gone_when_the_run_has_ended(run):
    config, result = run
    assert config.rollout.weights.transport == "disk"
    assert result.version >= 2
    assert list((result.run_dir / "weights").iterdir()) == []


def test_a_replay_knows_the_baselines(run, tmp_path):
    result = run[1]
    replayed = replay(result.run_dir, load_replay_config(result.run_dir, out=tmp_path))
    assert replayed.step == 2
    assert weights(replayed.model_path) == weights(result.model_path)


def test_the_same_attempts_teach_an_estimator_that_reads_anchors(run, tmp_path):
    result = run[1]
    changed = load_replay_config(result.run_dir, ["algorithm.advantage=gigpo"], out=tmp_path)
    assert weights(replay(result.run_dir, changed).model_path) != weights(result.model_path)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_learns_from_them(run, world, tmp_path, algorithm):
    """Real attempts of several turns, through credit, correction and updates; whole runs of some are in
    test_recipes_learn.py.
    """
    config, result = run
    overrides = [f"algorithm={algorithm}", f"rollout.group_size={config.rollout.group_size}"]
    replayed = replay(
        result.run_dir, load_replay_config(result.run_dir, overrides, file=world.config, out=tmp_path)
    )
    for record in read_metrics(tmp_path / "metrics.jsonl"):
        assert_learned(record)
    assert replayed.step == 2
    assert weights(replayed.model_path) != weights(world.folder / "model")


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_learns_a_step_from_them(run, world, tmp_path, recipe):
    """The learner of each, as configured, with a small model in the large one's place; whole runs are in
    test_recipe_runs.py.
    """
    config, result = run
    overrides = [
        "size=tiny",
        f"model.path={world.folder}/model",
        f"rollout.group_size={config.rollout.group_size}",
        "trainer.save_freq=-1",
    ]
    overrides += ["trainer.keep_best=0", "buffer.groups_per_step=4"]
    if recipe == "gsm8k_distill":
        # As its own teacher, the small model learns from the rewards alone.
        own_teacher = f"algorithm.distillation.teacher={world.folder}/model"
        overrides += [own_teacher, "algorithm.distillation.with_rewards=true"]
    own = load_replay_config(
        result.run_dir, overrides, file=CONFIGS / "recipes" / f"{recipe}.yaml", out=tmp_path
    )
    replayed = replay(result.run_dir, own, last_step=1)
    [record] = read_metrics(tmp_path / "metrics.jsonl")
    assert_learned(record)
    assert ("learner/critic/grad_norm" in record.values) is own.has_critic
    assert replayed.step == 1


def assert_learned(record):
    learned = {name: value for name, value in record.values.items() if name.startswith("learner/")}
    assert learned["learner/is_skipped"] == 0.0
    assert learned["learner/grad_norm"] > 0.0
    assert all(math.isfinite(value) for value in learned.values())


def weights(folder) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))


def test_a_run_whose_rewards_never_differ_ends_and_says_why():
    buffer = BufferConfig(groups_per_step=4, max_constant_batches=2)
    check_variance(7, buffer)
    with pytest.raises(InfrastructureError, match=r"8 groups without variance .* too easy or too hard"):
        check_variance(8, buffer)
