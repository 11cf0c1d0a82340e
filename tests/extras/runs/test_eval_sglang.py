"""`agentrl eval` against a real SGLang on a CPU: one that runs, killed in the middle and resumed, and one
that it starts itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from agentrl.data.trajectories import decode, read_parquet
from agentrl.servers.supervisor import Supervisor
from parts.stored_attempts import stored_keys
from sglang_cpu.environment import built_python
from sglang_cpu.server import sglang_on_cpu

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
NUM_ROWS = 9


@pytest.fixture(scope="module")
def url(world, tmp_path_factory) -> Iterator[str]:
    launcher = sglang_on_cpu(skip_tokenizer_init=True, max_total_tokens=8192)
    supervisor = Supervisor(
        launcher, log_file=tmp_path_factory.mktemp("log") / "log", start_timeout_s=400, max_restarts=0
    )
    yield supervisor.start(str(world.folder / "model"), "default")
    supervisor.stop()


def test_kill_9_in_the_middle_and_on_without_repeating(world, url, tmp_path) -> None:
    out, n = tmp_path / "out", 8
    arguments = (
        "eval",
        world.config,
        "--model",
        url,
        "--on",
        world.folder / "data/val.parquet",
        "--n",
        n,
        "--out",
        out,
    )
    arguments = tuple(map(str, (*arguments, "--temperature", 1.0, "rollout.max_concurrent_trajectories=8")))
    first = world.start(*arguments)
    first.wait_until(lambda: len(stored_keys(out / "attempts.sqlite")) >= 8)
    first.process.kill()
    first.process.wait(30)
    kept = stored_keys(out / "attempts.sqlite")
    assert 8 <= len(kept) < n * NUM_ROWS
    second = world.start(*arguments)
    assert second.wait(300) == 0, second.output()
    assert f"{len(kept)} of them already finished" in second.output()
    keys = stored_keys(out / "attempts.sqlite")
    assert keys[: len(kept)] == kept
    assert len(keys) == len(set(keys)) == n * NUM_ROWS
    assert json.loads((out / "results.json").read_text())["summary"]["overall"]["num_scored"] == n * NUM_ROWS


def test_greedy_attempts_are_those_of_the_embedded_server(world, url, tmp_path) -> None:
    said = {}
    for name, model in {"sglang": url, "embedded": world.folder / "model"}.items():
        out = tmp_path / name
        on = (
            "--on",
            world.folder / "data/val.parquet",
            "--greedy",
            "--agent",
            "single_turn_agent",
            "--out",
            out,
        )
        command = world.start(*map(str, ("eval", world.config, "--model", model, *on)))
        assert command.wait(300) == 0, command.output()
        said[name] = [attempt.messages for attempt in decode(read_parquet(out / "attempts.parquet"))]
    same = sum(one == other for one, other in zip(said["sglang"], said["embedded"], strict=True))
    assert same >= NUM_ROWS - 2, "two tokens that are nearly as likely may change places between engines"


def test_a_server_that_is_started_for_the_evaluation(world, tmp_path) -> None:
    command = world.start(
        "eval", str(world.config), "server=sglang_cpu", f"rollout.sglang.python={built_python()}",
        "rollout.server_start_timeout_s=400",
        "rollout.sglang.args.max_total_tokens=8192", "rollout.sglang.args.skip_tokenizer_init=true",
        "--on", str(world.folder / "data/val.parquet"), "--rows", "2", "--out", str(tmp_path),
    )  # fmt: skip
    assert command.wait(600) == 0, command.output()
    assert "starting 1 sglang server" in command.output()
    assert len(stored_keys(tmp_path / "attempts.sqlite")) == 2
    assert not command.left_behind()
