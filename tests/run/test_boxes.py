"""kill -9 of a rollout actor whose attempts have containers: the run goes on, and no container is left."""

from __future__ import annotations

import json

import pytest

from agentrl.boxes.audit import Containers
from agentrl.boxes.leases import BoxLease
from agentrl.figures.run_report import boxes_text
from agentrl.tracking.metrics import read_metrics
from parts.box_kinds import IMAGE, podman_command, why_no_podman

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
    assert boxes_text(read_metrics(run_dir / "metrics.jsonl")).startswith("boxes: ")
