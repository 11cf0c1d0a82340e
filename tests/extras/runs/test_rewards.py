"""A whole run with rewards of every scope: turn and attempt, group, and a batch function that fails once."""

from __future__ import annotations

import pytest

import agentrl
from agentrl.data.trajectories import decode, read_parquet
from agentrl.tracking.spans import BATCH_REWARD, GROUP_REWARD
from parts.collector import Collector

PLUGIN = '''
from agentrl.plugins import GroupReward, RewardResult, TurnReward


class Steps(TurnReward):
    """0.25 for each turn."""

    name = "steps"
    runs_in = "inline"

    def score(self, attempt):
        return [0.25] * attempt.num_turns


class Longest(GroupReward):
    """1 for the longest of the group."""

    name = "longest"
    runs_in = "process"

    def score(self, attempts):
        most = max(len(attempt.answer) for attempt in attempts)
        return [RewardResult(float(len(attempt.answer) == most)) for attempt in attempts]
'''

FUNCTION = """
from pathlib import Path


def compute_score(data_sources, solution_strs, ground_truths, extra_infos, folder):
    calls = len(list(Path(folder).iterdir()))
    (Path(folder) / f"{calls}_{len(solution_strs)}").touch()
    if calls == 1:  # the first is the validation's
        raise OSError("the grader is away")
    return [{"score": index / 8, "truth": truth} for index, truth in enumerate(ground_truths)]
"""


@pytest.mark.slow
def test_rewards_of_every_scope_reach_the_learner(world, capsys):
    run_dir, calls = world.folder / "scopes", world.folder / "calls"
    calls.mkdir()
    (world.folder / "scopes.py").write_text(PLUGIN)
    (world.folder / "batch.py").write_text(FUNCTION)
    config = agentrl.load_config(
        str(world.config),
        [
            f"trainer.run_dir={run_dir}",
            "trainer.steps=2",
            f"data.val_files=[{world.folder}/data/val.parquet]",
            f"agent.plugins=[{world.folder}/scopes.py]",
            f"reward.custom_function={{path: {world.folder}/batch.py, scope: batch, kwargs: {{folder: "
            f"{calls}}}}}",
            "reward.terms={steps: {weight: 2.0}, longest: {weight: 0.5, timeout_s: 100}, length_penalty: {}}",
            "reward.num_examine=1",
        ],
    )
    with Collector() as collector:
        spans = config.tracking.spans.model_copy(update={"endpoint": collector.url})
        tracking = config.tracking.model_copy(update={"spans": spans})
        result = agentrl.train(config.model_copy(update={"tracking": tracking}))

    assert result.step == 2
    assert result.counts.is_balanced
    assert (result.counts.consumed, dict(result.counts.dropped)) == (8, {"reward_error": 4})
    assert sorted(path.name for path in calls.iterdir()) == ["0_9", "1_8", "2_8", "3_8"], (
        "validation, the one that failed, two steps"
    )

    for step in (1, 2):
        trajectories = decode(read_parquet(run_dir / f"trajectories/step_{step:06d}.parquet"))
        for index, t in enumerate(trajectories):
            sums: dict[str, float] = {}
            for event in t.rewards:
                assert t.action_mask[event.position]
                sums[event.name] = sums.get(event.name, 0.0) + event.value
            assert sums.keys() >= {"custom", "steps", "longest", "length_penalty"}
            assert sums["custom"] == index / 8
            assert sums["steps"] == 2 * 0.25 * t.metrics["num_turns"]
            assert t.extra_info["reward_details"]["custom"].keys() == {"truth"}
        best = [
            max(
                sum(e.value for e in t.rewards if e.name == "longest")
                for t in trajectories
                if t.group_id == g
            )
            for g in {t.group_id for t in trajectories}
        ]
        assert best == [0.5] * 4

    (record, _) = world.records(run_dir).train
    assert (
        record["rollout/reward/custom"]
        == record["rollout/source/arithmetic/reward/custom"]
        == sum(range(8)) / 64
    )
    said = capsys.readouterr().out
    assert (
        "could not be scored and will be replaced: reward 'custom' raised OSError: the grader is away" in said
    )
    assert said.count("[ground truth]") == 1
    batches = [span for span in collector.spans if span.name == BATCH_REWARD]
    assert [
        (span.attributes["agentrl.kind"], span.attributes["agentrl.attempts"], span.error) for span in batches
    ] == [
        ("validation", 9, None),
        ("training", 8, "RewardError"),
        ("training", 8, None),
        ("training", 8, None),
    ]
    groups = [span.attributes for span in collector.spans if span.name == GROUP_REWARD]
    assert sum(one["agentrl.kind"] == "validation" for one in groups) == 9
    assert sum(one["agentrl.kind"] == "training" for one in groups) >= 12
    assert "[reward] custom: 0 on token" in said
