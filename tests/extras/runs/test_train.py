"""Whole runs: strictly on-policy by the process-group transport, asynchronous with stop and resume, killed
parts.
"""

import json
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest

import agentrl
from agentrl.data.trajectories import decode, read_parquet
from agentrl.extras.research.replay import load_replay_config, replay
from agentrl.extras.view.run_report import report_run
from agentrl.extras.view.shelf import Shelf
from agentrl.extras.view.sources import open_sources
from agentrl.types import SCORED_OUTCOMES
from parts.collector import Collector
from parts.span_trees import check_tree
from parts.tracked import tensorboard_texts


def overrides(world, name: str, **values) -> list[str]:
    return [
        f"trainer.run_dir={world.folder / name}",
        *(f"{key.replace('__', '.')}={value}" for key, value in values.items()),
    ]


def test_on_policy_run_with_two_ranks_and_the_process_group(world):
    """max_staleness=0: no token is ever old, and server and learner agree on every token before the first
    update.
    """
    run_dir = world.folder / "on_policy"
    config = agentrl.load_config(
        str(world.config),
        [
            *overrides(
                world,
                "on_policy",
                buffer__max_staleness=0,
                learner__world_size=2,
                trainer__steps=3,
                trainer__test_freq=3,
            ),
            f"data.val_files=[{world.folder}/data/val.parquet]",
            "rollout.weights.transport=distributed",
            "rollout.weights.bucket_bytes=20000",
            "rollout.weights.verify=true",
            "trainer.profile_steps=[2]",
            "trainer.logger=[console,wandb,tensorboard]",
            "tracking.report=true",
            f"tracking.baselines={{untrained: {world.folder}/model}}",
        ],
    )
    assert config.policy_mode == "on_policy"
    result = agentrl.train(config)

    assert result.step == 3
    assert result.counts.is_balanced
    assert result.counts.consumed == 12
    assert list(result.validation) == ["untrained", "initial", "final"]
    assert {"val/mean@1", "val/mean@1/low", "val/mean@1/high"} <= set(result.validation["final"])
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

    assert {path.name for path in (run_dir / "traces").glob("*/*")} == {
        "rank0.json.gz",
        "rank1.json.gz",
        "ray.json",
    }
    # What Ray knew: calls of the first publish are there, those of the last second may be missing.
    assert "Learner.tensor_specs" in (run_dir / "traces" / "step_000002" / "ray.json").read_text()

    trajectories = [
        t
        for step in (1, 2, 3)
        for t in decode(read_parquet(run_dir / f"trajectories/step_{step:06d}.parquet"))
    ]
    assert len(trajectories) == 24
    assert {t.agent_name for t in trajectories} == {"single_turn_agent", "tool_agent", "interaction_agent"}
    assert max(t.metrics["num_turns"] for t in trajectories) == 2, "a multi-turn row must be among them"
    assert all(t.outcome in SCORED_OUTCOMES for t in trajectories)
    for t in trajectories:
        assert all(t.action_mask[event.position] for event in t.rewards)

    for name in (
        "config.yaml",
        "report.png",
        "summary.md",
        "result.json",
        "policy/model.safetensors",
        "tensorboard",
        "wandb",
    ):
        assert (run_dir / name).exists(), name

    assert set(tensorboard_texts(run_dir)["val/attempts"]) == {0, 3}

    summary = (run_dir / "summary.md").read_text()
    (run_dir / "summary.md").unlink()
    report_run(run_dir)  # from the folder alone, the same
    assert (run_dir / "summary.md").read_text() == summary


STOPPED_STEPS = 14
"""As many as a run cannot make between its second checkpoint and the signal that follows."""


def test_stop_and_resume(world):
    """Ctrl-C ends everything that was started; the same command goes on where the checkpoint was.

    A collector gets the traces of both.
    """
    with Collector() as collector:
        _stop_and_resume(world, collector)
    roots = [check_tree(spans) for spans in collector.traces.values()]
    assert {root.attributes["agentrl.kind"] for root in roots if root.error is None} == {"training"}
    assert len(roots) >= STOPPED_STEPS * 4
    assert {"generate", "request", "reward"} <= {span.name for span in collector.spans}


def _stop_and_resume(world, collector):
    run_dir = world.folder / "stopped"
    arguments = [
        str(world.config),
        *overrides(
            world, "stopped", buffer__max_staleness=2, trainer__steps=STOPPED_STEPS, trainer__save_freq=1
        ),
    ]
    arguments.append("data.curriculum.by_pass_rate=true")  # what it draws is a part of the checkpoint
    arguments.append(f"tracking.spans.endpoint={collector.url}")
    arguments.append("tracking.token_ratios=true")
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
    assert all(r["rollout/truncated"] <= 1 for r in records)
    assert [r["curriculum/visited"] for r in records] == sorted(r["curriculum/visited"] for r in records), (
        "none is forgotten"
    )
    versions = [json.loads(line)["version"] for line in (run_dir / "versions.jsonl").read_text().splitlines()]
    assert versions == sorted(set(versions)), "a version was used twice"
    result = json.loads((run_dir / "result.json").read_text())
    assert result["balanced"]

    shelf = Shelf.of(open_sources([run_dir])[0], None)
    for file in shelf.source.files():
        for row in range(pq.read_metadata(file.path).num_rows if file.set == "training" else 0):
            stored = shelf.attempts.read(f"{file.name}:{row}")
            shown = shelf.tokens(stored)
            assert shown.ratios is not None
            assert [ratio is not None for ratio in shown.ratios] == [bool(sampled) for sampled in shown.mask]
            fresh = [
                ratio
                for ratio, version in zip(shown.ratios, shown.versions, strict=True)
                if version == stored.others["learned_by"]
            ]
            np.testing.assert_allclose(fresh, 1, atol=1e-3)

    # The learner is a function of what it was given: a replay of the stored trajectories ends at the same
    # weights, bit for bit.
    replayed = replay(run_dir, load_replay_config(run_dir))
    assert replayed.step == STOPPED_STEPS
    assert (replayed.model_path / "model.safetensors").read_bytes() == (
        run_dir / "policy/model.safetensors"
    ).read_bytes()
    assert result["counts"]["consumed"] == STOPPED_STEPS * 4
    assert len(list((run_dir / "checkpoints").glob("step_*"))) == 3  # keep_last


@pytest.mark.slow
def test_killed_rollout_actor_and_server(world):
    """kill -9 of a rollout actor and of one of two servers: the run replaces both and every group is
    accounted for.

    The weights go by the process group, which must be formed anew for the server that comes back, and then
    for both.
    """
    run_dir = world.folder / "killed"
    arguments = [
        str(world.config),
        *overrides(world, "killed", buffer__max_staleness=1, trainer__steps=100_000, rollout__num_servers=2),
    ]
    arguments.append("rollout.weights.transport=distributed")
    run = world.start("train", *arguments)
    run.wait_until(lambda: world.num_steps(run_dir) >= 2)
    run.kill_one("ray::RolloutActor")
    run.wait_until(lambda: "takes over" in run.output())
    steps = world.num_steps(run_dir)
    run.wait_until(lambda: world.num_steps(run_dir) > steps)
    run.kill_one("agentrl.extras.embedded")
    run.wait_until(lambda: "was restarted and gets version" in run.output())
    steps = world.num_steps(run_dir)
    run.wait_until(lambda: world.num_steps(run_dir) > steps + 2)
    run.interrupt()
    assert run.wait() == 130, run.output()
    assert run.left_behind() == []

    groups, files = Counter(), sorted((run_dir / "trajectories").glob("*.parquet"))
    for path in files:
        groups.update({t.group_id for t in decode(read_parquet(path))})
    assert len(groups) == len(files) * 4
    assert set(groups.values()) == {1}, "a group was trained twice"
    for record in world.records(run_dir).train:
        assert record["rollout/lag/max"] <= 1
        dropped = sum(value for name, value in record.items() if name.startswith("buffer/dropped_"))
        states = [record[f"buffer/{state}"] for state in ("queued", "leased", "ready", "consumed")]
        assert record["buffer/drawn"] == sum(states) + dropped
