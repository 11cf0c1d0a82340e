"""Whole runs that lose a learner rank, their disk, or their driver: what is lost comes back, and nothing is
left running.
"""

import json
import os
import resource
import signal
import time
from pathlib import Path

import pytest

from agentrl.config.trainer import TrainerConfig
from agentrl.controller.checkpoint import find_checkpoint, tidy
from agentrl.extras.research.audit import audit_run
from agentrl.extras.research.replay import load_replay_config, replay

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LIMIT_S = 600.0
"""Of one wait; it ends at once when the run does."""


def arguments(world, name: str, *more: str) -> list[str]:
    return [str(world.config), f"trainer.run_dir={world.folder / name}", *more]


def ranks(run) -> list[int]:
    """The pids of the learner's ranks; Ray names a process after the call that it makes."""
    found = []
    for process in run.processes():
        name = title(process.pid)
        if name.startswith(("ray::Learner", "ray::Critic", "ray::WorkerHost")):
            found.append(process.pid)
    return sorted(found)


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def kill_rank_in(run, call: str) -> int:
    """kill -9 a rank while it is in `call`, the last one that is; return its pid."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        assert run.process.poll() is None, run.output()
        pids = ranks(run)
        until = time.monotonic() + 5  # then the pids are read again
        while time.monotonic() < until:
            for pid in reversed(pids):
                if title(pid).startswith(f"ray::{call}"):
                    os.kill(pid, signal.SIGKILL)
                    return pid
            time.sleep(0.001)
    raise AssertionError(f"no rank was seen in {call}:\n{run.output()}")


def newest_step(run_dir: Path) -> int:
    """The step of the newest checkpoint, every file of it verified, as the next start would find it; 0
    without one.
    """
    tidy(run_dir / "checkpoints")
    checkpoint = find_checkpoint(run_dir / "checkpoints", TrainerConfig())
    return 0 if checkpoint is None else checkpoint.step


def is_reproduced(run_dir: Path) -> bool:
    """Whether the stored trajectories alone lead to the same weights, bit for bit: each step was made once,
    from the step before.
    """
    replayed = replay(run_dir, load_replay_config(run_dir))
    return (replayed.model_path / "model.safetensors").read_bytes() == (
        run_dir / "policy/model.safetensors"
    ).read_bytes()


def test_ranks_that_are_killed_start_again_from_the_newest_checkpoint(world):
    """In a collective before the first checkpoint, during a publish by the process group, and while a
    checkpoint is written.
    """
    run_dir = world.folder / "lost_ranks"
    more = ("learner.world_size=2", "trainer.steps=30", "trainer.save_freq=3", "buffer.max_staleness=2")
    by_groups = ("rollout.weights.transport=distributed", "rollout.weights.sources=2")
    run = world.start("train", *arguments(world, "lost_ranks", *more, *by_groups))
    run.wait_until(lambda: world.num_steps(run_dir) >= 1, LIMIT_S)
    for num_lost, call in enumerate(
        ("Learner.update", "Learner.send_buckets", "Learner.start_save"), start=1
    ):
        run.wait_until(lambda number=num_lost: number == 1 or newest_step_seen(run_dir) >= 3, LIMIT_S)
        killed = kill_rank_in(run, call)
        run.wait_until(lambda number=num_lost: f"(restart {number} of 3)" in run.output(), LIMIT_S)
        run.wait_until(lambda pid=killed: len(ranks(run)) == 2 and pid not in ranks(run), LIMIT_S)
    assert run.wait(LIMIT_S) == 0, run.output()
    assert "restarting all ranks from the initial weights (restart 1 of 3)" in run.output()
    assert run.output().count("restarting all ranks from step_0000") == 2
    assert "Traceback" not in run.output()
    assert run.left_behind() == []

    assert [r["step"] for r in world.records(run_dir).train] == list(range(1, 31)), "each step once"
    assert all(r["rollout/lag/max"] <= 2 for r in world.records(run_dir).train)
    versions = [json.loads(line)["version"] for line in (run_dir / "versions.jsonl").read_text().splitlines()]
    assert versions == list(range(len(versions)))
    result = json.loads((run_dir / "result.json").read_text())
    assert result["balanced"]
    assert result["counts"]["consumed"] == 30 * 4, (
        "what lost steps had learned from is not counted as learned from"
    )
    assert newest_step(run_dir) == 30
    assert is_reproduced(run_dir)


def test_recorders_that_are_killed_leave_no_step_out(world):
    run_dir = world.folder / "lost_recorder"
    run = world.start("train", *arguments(world, "lost_recorder", "trainer.steps=14", "trainer.save_freq=7"))
    for step in (1, 5, 9):
        run.wait_until(lambda step=step: world.num_steps(run_dir) >= step, LIMIT_S)
        run.wait_until(lambda: any(title(one.pid).startswith("ray::Recorder") for one in run.processes()))
        for process in run.processes():
            if title(process.pid).startswith("ray::Recorder"):
                os.kill(process.pid, signal.SIGKILL)
    assert run.wait(LIMIT_S) == 0, run.output()
    assert "Traceback" not in run.output()
    files = sorted(path.name for path in (run_dir / "trajectories").iterdir())
    assert files == [f"step_{step:06d}.parquet" for step in range(1, 15)]
    audit = audit_run(run_dir).audit
    assert audit.is_balanced, audit.problems


def test_a_rank_that_is_killed_before_the_first_publish_ends_nothing(world):
    """All parts stand, and the run is about to publish, or to validate."""
    run_dir = world.folder / "lost_early"
    run = world.start("train", *arguments(world, "lost_early", "learner.world_size=2", "trainer.steps=3"))
    run.wait_until((run_dir / "readiness.txt").exists, LIMIT_S)
    os.kill(ranks(run)[-1], signal.SIGKILL)
    assert run.wait(LIMIT_S) == 0, run.output()
    assert "restarting all ranks from the initial weights (restart 1 of 3)" in run.output()
    assert "Traceback" not in run.output()
    assert [r["step"] for r in world.records(run_dir).train] == [1, 2, 3]
    assert is_reproduced(run_dir)


def test_ranks_that_are_killed_while_they_start_are_started_again(world):
    """Of a new run, and of one that is resumed."""
    run_dir = world.folder / "lost_starting"
    for steps, begun in ((2, []), (4, ["resumed from step_000002"])):
        more = arguments(
            world, "lost_starting", "learner.world_size=2", f"trainer.steps={steps}", "trainer.save_freq=1"
        )
        run = world.start("train", *more)
        kill_rank_in(run, "WorkerHost.start")
        assert run.wait(LIMIT_S) == 0, run.output()
        assert "restarting all ranks (restart 1 of 3)" in run.output()
        assert all(words in run.output() for words in begun)
        assert "Traceback" not in run.output()
        assert run.left_behind() == []
    assert [r["step"] for r in world.records(run_dir).train] == [1, 2, 3, 4]


@pytest.mark.parametrize("call", ["Critic.update", "Critic.start_save"])
def test_a_lost_rank_of_the_critic_brings_back_all_roles(world, call):
    run_dir = world.folder / call
    run = world.start(
        "train", *arguments(world, call, "algorithm=ppo", "trainer.steps=8", "trainer.save_freq=2")
    )
    run.wait_until(lambda: newest_step_seen(run_dir) >= 2, LIMIT_S)
    kill_rank_in(run, call)
    assert run.wait(LIMIT_S) == 0, run.output()
    assert "critic rank 0 was lost" in run.output()
    assert "restarting all ranks from step_0000" in run.output()
    assert "Traceback" not in run.output()
    assert [r["step"] for r in world.records(run_dir).train] == list(range(1, 9))
    assert is_reproduced(run_dir)


def test_a_run_that_loses_too_many_ranks_ends_with_the_cause_and_resumes(world):
    run_dir = world.folder / "too_many"
    more = arguments(world, "too_many", "trainer.steps=6", "trainer.save_freq=1", "learner.max_restarts=0")
    run = world.start("train", *more)
    run.wait_until(lambda: newest_step_seen(run_dir) >= 1, LIMIT_S)
    kill_rank_in(run, "Learner.update")
    assert run.wait(LIMIT_S) == 1, run.output()
    assert "learner rank 0 was lost during 'update', and learner.max_restarts=0 is used up" in run.output()
    assert "Traceback" not in run.output()
    assert run.left_behind() == []
    assert world.start("train", *more).wait(LIMIT_S) == 0
    assert [r["step"] for r in world.records(run_dir).train] == list(range(1, 7))


def newest_step_seen(run_dir: Path) -> int:
    """The same of a run that goes on, whose folder must not be tidied."""
    steps = [
        int(path.parent.name.removeprefix("step_"))
        for path in (run_dir / "checkpoints").glob("step_*/manifest.json")
    ]
    return max(steps, default=0)


def test_a_full_disk_is_said_and_waited_for(world):
    """The kernel refuses driver and rank to write any file for some steps: the run goes on, and makes up for
    it when it may write again.
    """
    run_dir = world.folder / "full_disk"
    more = (
        "trainer.steps=400",
        "trainer.save_freq=1",
        "buffer.max_staleness=2",
        "rollout.weights.transport=distributed",
    )
    run = world.start("train", *arguments(world, "full_disk", *more))
    run.wait_until(lambda: newest_step_seen(run_dir) >= 2, LIMIT_S)
    pids = [run.process.pid, *ranks(run)]
    kept = newest_step_seen(run_dir)
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    num_before = num_versions(run)
    time.sleep(15)
    assert run.process.poll() is None, run.output()
    assert newest_step(run_dir) >= kept, "what was saved before stays"
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    seen = newest_step_seen(run_dir)
    run.wait_until(
        lambda: newest_step_seen(run_dir) > seen and world.num_steps(run_dir) > num_before, LIMIT_S
    )
    run.interrupt()
    assert run.wait(LIMIT_S) == 130, run.output()
    records = world.records(run_dir).train
    assert [r["step"] for r in records] == list(range(1, len(records) + 1)), "a record waits for its disk"
    assert sum(r["trainer/unwritten_files"] for r in records) > 0
    assert newest_step(run_dir) > kept


def num_versions(run) -> int:
    return run.output().count("step ")


@pytest.mark.parametrize("weights", ["disk", "distributed"])
def test_however_and_wherever_a_run_is_stopped_nothing_is_left_and_the_same_command_goes_on(world, weights):
    """While it starts, validates, publishes, saves and learns; by Ctrl-C, SIGTERM, kill -9 of the driver, and
    by a second Ctrl-C.
    """
    run_dir = world.folder / f"stopped_{weights}"
    more = ["trainer.save_freq=1", "trainer.test_freq=2", f"data.val_files=[{world.folder}/data/val.parquet]"]
    command = arguments(
        world, run_dir.name, *more, "learner.world_size=2", f"rollout.weights.transport={weights}"
    )
    publish = {"disk": "Learner.export", "distributed": "Learner.send_buckets"}[weights]
    moments = {
        "WorkerHost": "Ctrl-C",
        "RolloutActor.play": "SIGTERM",
        publish: "Ctrl-C",
        "Learner.start_save": "kill -9",
        "Learner.update": "twice",
    }
    for call, how in moments.items():
        run = world.start("train", *command, "trainer.steps=1000")
        if (
            how == "twice"
        ):  # the first that gets so far: those before were stopped before or in their first checkpoint
            run.wait_until(lambda: newest_step_seen(run_dir) >= 1, LIMIT_S)
        wait_for_call(run, call)
        started = time.monotonic()
        stop(run, how)
        status = run.wait(LIMIT_S)
        assert status == (-signal.SIGKILL if how == "kill -9" else 130), f"{call}, {how}:\n{run.output()}"
        assert "Traceback" not in run.output(), f"{call}, {how}:\n{run.output()}"
        assert run.left_behind(grace_s=60) == [], f"{call}, {how}: something was left running"
        assert time.monotonic() - started < 180, f"{call}, {how}"
        newest_step(run_dir)  # raises for one that is damaged
    saved = newest_step(run_dir)
    assert saved >= 1
    last = world.start("train", *command, f"trainer.steps={saved + 2}")
    assert last.wait(LIMIT_S) == 0, last.output()
    assert f"resumed from step_{saved:06d}" in last.output()
    assert [r["step"] for r in world.records(run_dir).train] == list(range(1, saved + 3)), "each step once"
    again = world.start("train", *command, f"trainer.steps={saved + 2}")
    assert again.wait(LIMIT_S) == 0, again.output()
    assert f"this run is complete ({saved + 2} of {saved + 2} steps)" in again.output()
    assert list((run_dir / "weights").iterdir()) == [], "nobody reads them any more"


def stop(run, how: str) -> None:
    run.process.send_signal({"SIGTERM": signal.SIGTERM, "kill -9": signal.SIGKILL}.get(how, signal.SIGINT))
    if how == "twice":
        time.sleep(1.5)
        run.interrupt()


def wait_for_call(run, call: str) -> None:
    """Wait until a process of the run is in `call`."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        assert run.process.poll() is None, run.output()
        pids = [process.pid for process in run.processes()]
        until = time.monotonic() + 2
        while time.monotonic() < until:
            if any(title(pid).startswith(f"ray::{call}") for pid in pids):
                return
            time.sleep(0.002)  # or nothing is left for the run, which is nicer than the tests
    raise AssertionError(f"{call} was not seen:\n{run.output()}")
