"""kill -9 of the process that owns boxes: nobody calls `close`, and nothing is left."""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from agentrl.extras.boxes.audit import Containers
from parts.box_kinds import IMAGE, named, podman_command, why_no_podman

KILLED = """
import json, sys, trio
from agentrl.extras.boxes.workspace import Workspace

async def main():
    workspace = Workspace(json.loads(sys.argv[2]))
    await workspace.start()
    sleep = f"exec -a {sys.argv[1]} sleep 9999"
    await workspace.bash(f"({sleep}) >/dev/null 2>&1 & setsid bash -c '{sleep}' >/dev/null 2>&1 &")
    print("ready", flush=True)
    await workspace.bash(sleep)

trio.run(main)
"""
WAIT_S = 60


def process() -> Mapping[str, Any]:
    return {}


def bubblewrap() -> Mapping[str, Any]:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    return {"kind": "bubblewrap", "warm": 1}


def podman() -> Mapping[str, Any]:
    if why := why_no_podman():
        pytest.skip(why)
    return {"kind": "podman", "command": podman_command(), "image": IMAGE, "warm": 1}


def becomes_true(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize("kind", [process, bubblewrap, pytest.param(podman, marks=pytest.mark.slow)])
def test_a_killed_run_leaves_nothing_running(kind: Callable[[], Mapping[str, Any]]) -> None:
    config, name = kind(), f"box-{secrets.token_hex(8)}"
    command = [sys.executable, "-c", KILLED, name, json.dumps(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            assert running.stdout.readline() == "ready\n"
            assert becomes_true(lambda: len(named(name)) >= 2)
            if "command" in config:
                assert Containers(config["command"]).found()
        finally:
            running.send_signal(signal.SIGKILL)
    assert becomes_true(lambda: named(name) == [])
    if "command" in config:
        assert becomes_true(lambda: Containers(config["command"]).found() == [])
