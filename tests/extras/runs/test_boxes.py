"""Runs whose attempts have boxes of images: terminal tasks with tests of their own, and kill -9 of a rollout
actor, after which the run goes on and no container is left.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.data.trajectories import decode, read_parquet
from agentrl.extras.boxes.audit import Containers
from agentrl.extras.boxes.leases import BoxLease
from agentrl.extras.boxes.closing import box_lines
from agentrl.tracking.metrics import read_metrics
from parts.box_kinds import BUBBLEWRAP_IS_HERE, IMAGE, podman_command, root, why_no_podman
from parts.root_file_system import can_be_made

OPTIONS = {"kind": "podman", "image": IMAGE, "max_boxes": 4, "warm": 1, "memory_mib": 256}


@pytest.mark.slow
def test_a_killed_rollout_actor_leaves_no_container(world) -> None:
    if why := why_no_podman():
        pytest.skip(why)
    run_dir, engine = world.folder / "boxes", podman_command()
    rows = world.folder / "boxes.jsonl"
    row = {
        "data_source": "boxes",
        "prompt": [{"role": "user", "content": "1 + 1"}],
        "agent_name": "tool_agent",
        "reward_model": {"ground_truth": "2"},
        "extra_info": {"environment_kwargs": {"name": "workspace"}},
    }
    rows.write_text(f"{json.dumps(row)}\n" * 64)
    options = ", ".join(f"{key}: {value}" for key, value in OPTIONS.items())
    run = world.start(
        "train",
        str(world.config),
        f"trainer.run_dir={run_dir}",
        "trainer.steps=100000",
        f"data.train_files=[{rows}]",
        "agent.environment=workspace",
        "agent.tools=[]",
        "reward.sources={boxes: format}",
        "reward.reward_config={format: {form: boxed}}",
        "data.max_prompt_tokens=1024",
        f"agent.environment_config={{workspace: {{{options}, command: [{','.join(engine)}]}}}}",
        "agent.environment_timeout_s=120",
        "rollout.max_concurrent_trajectories=4",
        "buffer.stall_timeout_s=300",
    )
    run.wait_until(lambda: world.num_steps(run_dir) >= 1, timeout_s=300)
    killed = run.kill_one("ray::RolloutActor")
    run.wait_until(lambda: "takes over" in run.output(), timeout_s=300)
    owners = lambda: {BoxLease.parse(box.lease).pid for box in Containers(engine).found()}  # noqa: E731
    run.wait_until(lambda: killed not in owners())
    steps = world.num_steps(run_dir)
    run.wait_until(lambda: world.num_steps(run_dir) > steps, timeout_s=300)
    run.interrupt()
    assert run.wait() == 130, run.output()
    assert run.left_behind() == []
    assert Containers(engine).found() == []
    records = world.records(run_dir).train
    assert records[0]["boxes/started"] > 0
    assert all(record["boxes/open"] <= OPTIONS["max_boxes"] for record in records)
    [line] = box_lines(read_metrics(run_dir / "metrics.jsonl"))
    assert line.startswith("boxes: ")


@pytest.mark.slow
def test_terminal_tasks_are_trained(world, tmp_path: Path) -> None:
    if not BUBBLEWRAP_IS_HERE or not can_be_made():
        pytest.skip("bubblewrap is not installed, or there is no /usr/bin/python3 to make an image of")
    for name in ("one", "two"):
        tests = tmp_path / "tasks" / name / "tests"
        tests.mkdir(parents=True)
        (tests.parent / "task.toml").write_text(f'[environment]\ndocker_image = "{root()}"\n')
        (tests.parent / "instruction.md").write_text(f"Write {name} to a.txt.\n")
        judge = f"reward=0.25\ngrep -q {name} a.txt && reward=1\necho $reward > /logs/verifier/reward.txt"
        (tests / "test.sh").write_text(f"#!/bin/bash\n{judge}\n")
    rows, run_dir = tmp_path / "tasks.jsonl", tmp_path / "run"
    written = world.start("data", "harbor", str(tmp_path / "tasks"), str(rows))
    assert written.wait() == 0, written.output()
    run = world.start(
        "train",
        str(world.config),
        f"trainer.run_dir={run_dir}",
        "trainer.steps=2",
        "trainer.save_freq=-1",
        "buffer.groups_per_step=2",
        f"data.train_files=[{rows}]",
        "data.max_prompt_tokens=900",
        "agent.tools=[]",
        "agent.environment_config={terminal: {kind: bubblewrap, folder: /testbed, max_boxes: 4}}",
        "agent.environment_timeout_s=120",
        "reward.sources={harbor: terminal}",
        "rollout.max_concurrent_trajectories=4",
    )
    assert run.wait(400) == 0, run.output()
    assert run.left_behind() == []
    assert "attempt failed" not in run.output()
    files = (run_dir / "trajectories").glob("step_*.parquet")
    rewards = [attempt.reward for file in files for attempt in decode(read_parquet(file))]
    assert rewards == [0.25] * 8, "a random model writes nothing, and the task's tests say so"
