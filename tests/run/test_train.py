"""Whole runs: strictly on-policy by the process-group transport; asynchronous, stopped and resumed."""

import json

import agentrl
from agentrl.data.trajectories import decode, read_parquet
from agentrl.types import SCORED_OUTCOMES

STOPPED_STEPS = 14
"""As many as a run cannot make between its second checkpoint and the signal that follows."""


def overrides(world, name: str, **values) -> list[str]:
    return [
        f"trainer.run_dir={world.folder / name}",
        *(f"{key.replace('__', '.')}={value}" for key, value in values.items()),
    ]


def stored(run_dir, steps):
    return [
        trajectory
        for step in steps
        for trajectory in decode(read_parquet(run_dir / f"trajectories/step_{step:06d}.parquet"))
    ]


def test_on_policy_run_with_two_ranks_and_the_process_group(world):
    """max_staleness=0: no token is ever old, and server and learner agree on every token before the first
    update.
    """
    run_dir = world.folder / "on_policy"
    values = {
        "buffer__max_staleness": 0,
        "learner__world_size": 2,
        "trainer__steps": 3,
        "trainer__test_freq": 3,
        "data__val_files": f"[{world.folder}/data/val.jsonl]",
        "rollout__weights__transport": "distributed",
        "rollout__weights__bucket_bytes": 20000,
        "rollout__weights__verify": "true",
    }
    config = agentrl.load_config(str(world.config), overrides(world, "on_policy", **values))
    assert config.policy_mode == "on_policy"
    result = agentrl.train(config)

    assert result.step == 3
    assert result.counts.is_balanced
    assert result.counts.consumed == 12
    assert list(result.validation) == ["initial", "final"]
    validated = decode(read_parquet(run_dir / "validation/step_000003.parquet"))
    assert {version for t in validated for version in t.versions[t.action_mask].tolist()} == {result.version}

    records = world.records(run_dir)
    assert [r["step"] for r in records.train] == [1, 2, 3]
    assert all(r["rollout/lag/max"] == 0 for r in records.train)
    # Every step makes one update with prox := policy, so this holds for each; behavior comes from the server,
    # over all turns.
    assert all(r["learner/mismatch_max"] < 1e-4 for r in records.train)
    assert all(r["learner/ppo_kl"] == 0 and r["learner/ratio_max"] == 1 for r in records.train)
    assert all(r["publish/bytes"] > 0 and r["publish/gather_s"] > 0 for r in records.train)

    trajectories = stored(run_dir, (1, 2, 3))
    assert len(trajectories) == 24
    assert {t.agent_name for t in trajectories} == {"single_turn_agent", "tool_agent", "interaction_agent"}
    assert max(t.metrics["num_turns"] for t in trajectories) == 2, "a multi-turn row must be among them"
    assert {t.reward for t in trajectories} == {0.0, 1.0}, "there is something to learn"
    assert all(t.outcome in SCORED_OUTCOMES for t in trajectories)
    for t in trajectories:
        assert all(t.action_mask[event.position] for event in t.rewards)
    for name in ("config.yaml", "result.json", "policy/model.safetensors"):
        assert (run_dir / name).exists(), name


def test_stop_and_resume(world):
    """Ctrl-C ends everything that was started; the same command goes on where the checkpoint was."""
    run_dir = world.folder / "stopped"
    values = {"buffer__max_staleness": 2, "trainer__steps": STOPPED_STEPS, "trainer__save_freq": 1}
    # What the curriculum draws is a part of the checkpoint.
    arguments = [
        str(world.config),
        *overrides(world, "stopped", **values, data__curriculum__by_pass_rate="true"),
    ]
    first = world.start("train", *arguments)
    first.wait_until(lambda: (run_dir / "checkpoints/step_000002/manifest.json").exists())
    first.interrupt()
    assert first.wait() == 130, first.output()
    assert "interrupted; everything saved so far is kept, and the same command resumes" in first.output()
    assert "Traceback" not in first.output()
    assert first.left_behind() == [], "something was left running"
    saved = max(int(p.name.removeprefix("step_")) for p in (run_dir / "checkpoints").glob("step_*"))
    assert saved < STOPPED_STEPS

    second = world.start("train", *arguments)
    assert second.wait() == 0, second.output()
    assert f"resumed from step_{saved:06d}" in second.output()
    records = world.records(run_dir).train
    assert [r["step"] for r in records] == list(range(1, STOPPED_STEPS + 1)), "each step once"
    assert all(r["rollout/lag/max"] <= 2 for r in records)
    assert [r["curriculum/visited"] for r in records] == sorted(r["curriculum/visited"] for r in records), (
        "none is forgotten"
    )
    versions = [json.loads(line)["version"] for line in (run_dir / "versions.jsonl").read_text().splitlines()]
    assert versions == sorted(set(versions)), "a version was used twice"
    result = json.loads((run_dir / "result.json").read_text())
    assert result["balanced"]
    assert result["counts"]["consumed"] == STOPPED_STEPS * 4
    groups = [t.group_id for t in stored(run_dir, range(1, STOPPED_STEPS + 1))]
    assert len(set(groups)) == STOPPED_STEPS * 4, "a group was trained twice"
    assert len(list((run_dir / "checkpoints").glob("step_*"))) == 3  # keep_last
