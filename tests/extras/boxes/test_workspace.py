"""The tools of a workspace as the model sees them: what it reads, what stays, and what it can do wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import trio
import trio.testing

from agentrl.errors import ConfigError, DataError, PluginError
from agentrl.extras.boxes.workspace import Workspace
from agentrl.plugins import Environment
from agentrl.testing import Call, play
from agentrl.types import Outcome

CONFIG = {"max_boxes": 4, "command_timeout_s": 30.0}


def talk(*calls: tuple[str, Mapping[str, Any]], config: Mapping[str, Any] = CONFIG, **row: Any) -> list[str]:
    """Return the answers of one attempt's calls, in which a wrong call is told as `error: ...`."""
    turns = [Call(name, dict(arguments)) for name, arguments in calls]
    trajectory = play(
        [*turns, "done"],
        environment="workspace",
        environment_kwargs=row,
        environment_config={"workspace": dict(config)},
        max_turns=len(turns) + 1,
        max_tool_output_tokens=4000,
    )
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.failure
    return [message.content for message in trajectory.messages if message.role == "tool"]


def test_what_one_call_leaves_the_next_one_finds() -> None:
    answers = talk(
        ("bash", {"command": "cat src/a.py; cd src; export X=1; pwd"}),
        ("bash", {"command": 'basename "$(pwd)"; echo "[$X]"; exit 3'}),
        ("python", {"code": "import sys\nx = 6 * 7\nprint('out')\nprint('err', file=sys.stderr)\nx"}),
        ("python", {"code": "open('n', 'w').write(str(x)); 1 / 0"}),
        ("bash", {"command": "cat n; echo; git --version | cut -c 1-3"}),
        ("edit", {"path": "src/a.py", "old": "1", "new": "2"}),
        ("edit", {"path": "new/b.py", "old": "", "new": "print('b')\n"}),
        ("bash", {"command": "cat src/a.py; python3 new/b.py"}),
        ("python", {"code": "exit()"}),
        ("python", {"code": "x"}),
        files={"src/a.py": "a = 1\n"},
    )
    folder = answers[0].splitlines()
    assert folder[0] == "a = 1"
    assert folder[1].endswith("/work/src")
    assert answers[1] == "work\n[]\n[exit code 3]"
    assert answers[2] == "out\nerr\n42"
    assert "ZeroDivisionError: division by zero" in answers[3]
    assert answers[4] == "42\ngit"
    assert answers[5:8] == ["changed src/a.py", "wrote new/b.py", "a = 2\nb"]
    assert answers[8] == "[the interpreter has ended: its variables are gone]"
    assert "NameError: name 'x' is not defined" in answers[9]


def test_whatever_the_model_does_is_told_and_fails_no_attempt() -> None:
    answers = talk(
        ("bash", {"command": "echo begun; sleep 60"}),
        ("python", {"code": "y = 1\nimport time\ntime.sleep(60)"}),
        ("python", {"code": "y"}),
        ("python", {"code": "import os; os._exit(1)"}),
        ("bash", {"command": "seq 1 100000"}),
        ("bash", {"command": "a\0b"}),
        ("bash", {"command": "sleep 1000 & echo started"}),
        ("edit", {"path": "a.txt", "old": "x", "new": "y"}),
        ("edit", {"path": "missing", "old": "x", "new": "y"}),
        ("edit", {"path": "/etc/passwd/x", "old": "", "new": "y"}),
        ("bash", {"command": "ls /root /home; cat /etc/shadow"}),
        ("bash", {"command": "kill -9 -1"}),
        ("bash", {"command": "echo again"}),
        ("edit", {"path": "a.txt", "old": "", "new": "y"}),
        config={**CONFIG, "command_timeout_s": 1.0},
        files={"a.txt": "one\n"},
    )
    assert answers[0] == "begun\n[ended after 1.0 s: it took too long]"
    assert answers[1].endswith("[interrupted after 1 s: it took too long; variables are kept]")
    assert answers[2] == "1"
    assert answers[3] == "[the interpreter was ended: its variables are gone]"
    assert answers[4].startswith("1\n2\n")
    assert answers[4].endswith("\n100000")
    assert len(answers[4]) < 10_000
    assert "null byte" in answers[5]
    assert answers[6] == "started"
    assert answers[7] == "error: a.txt does not contain `old`"
    assert answers[8] == "error: missing: no such file; to write a new one, leave `old` empty"
    assert answers[9].startswith("error: /etc/passwd/x: ")
    assert "No such file or directory" in answers[10]
    assert all("the box is over" in answer for answer in answers[11:])


def test_a_box_that_takes_too_much_memory_is_told_as_such() -> None:
    code = (
        "import subprocess\nhogs = [subprocess.Popen(['python3', '-c', 'x = bytearray(2 * 10**8); input()'], "
    )
    code += "stdin=subprocess.PIPE) for _ in range(3)]\n[hog.wait() for hog in hogs]"
    (answer,) = talk(("python", {"code": code}), config={**CONFIG, "memory_mib": 512})
    assert "the box is over, and its files are gone: ended: it used too much memory" in answer


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"kind": "cloud"}, "environment 'workspace': kind: "),
        ({"modal": {"app": "mine"}}, "kind 'process' has no options modal"),
        ({"kind": "modal", "modal": {"app": "a b"}}, "environment 'workspace': modal.app: "),
        ({"kind": "modal", "modal": {"idle_s": 1}}, "environment 'workspace': modal.idle_s: "),
        ({"kind": "modal", "lifetime_s": 90_000}, "at most 86400"),
        ({"boxes": 1}, "environment 'workspace': boxes: "),
        ({"max_boxes": 0}, "environment 'workspace': max_boxes: "),
        ({"image": "python:3.12"}, "kind 'process' has no images"),
        ({"scratch": ["/data"]}, "kind 'process' has no further writable folders"),
        ({"kind": "fusion"}, "kind fusion needs the URL of its server"),
        ({"url": "http://127.0.0.1:8080"}, "and no other kind has one"),
        ({"api_key_env": "KEY"}, "kind 'process' has no api_key_env"),
        ({"command": ["podman"]}, "kind 'process' has no command"),
        ({"kind": "bubblewrap", "folder": "/a/../b"}, "give an absolute path below /"),
        ({"kind": "bubblewrap", "folder": "/"}, "give an absolute path below /"),
        ({"kind": "docker", "command": ["no-such-engine"]}, "the command no-such-engine is not installed"),
    ],
)
def test_options_are_checked(config: dict, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Workspace(config)


def test_a_back_end_that_breaks_is_no_fault_of_config_or_row(tmp_path) -> None:
    engine = tmp_path / "engine"
    engine.write_text("#!/nowhere/at/all\n")
    engine.chmod(0o755)
    config = {"kind": "podman", "command": [str(engine)], "image": "any"}
    trajectory = play(["done"], environment="workspace", environment_config={"workspace": config})
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
    assert trajectory.failure is not None
    assert "SandboxError: `" in trajectory.failure.text


def test_a_workspace_returns_to_a_snapshot_and_forks() -> None:
    async def main() -> None:
        workspace = Workspace({**CONFIG, "max_boxes": 2})
        try:
            await workspace.start(files={"a.txt": "one\n"})
            snapshot = await workspace.snapshot()
            await workspace.bash("echo two > a.txt; echo > b.txt")
            other = await workspace.fork()
            try:
                await workspace.restore(snapshot)
                assert (await workspace.bash("ls; cat a.txt")).text == "a.txt\none"
                assert (await other.bash("ls; cat a.txt")).text == "a.txt\nb.txt\ntwo"
            finally:
                await other.close()
            assert workspace.pool is not None
            assert workspace.pool.counts.num_open == 1
        finally:
            await workspace.close()

    trio.run(main)


def test_an_environment_without_snapshots_says_so() -> None:
    class Plain(Environment):
        name = "plain"

    for method in (Plain().snapshot, lambda: Plain().restore(b"")):
        with pytest.raises(PluginError, match="environment 'plain' has no snapshots"):
            trio.run(method)


def test_what_a_row_has_is_checked(tmp_path) -> None:
    (tmp_path / "no.tar").write_bytes(b"no archive" * 1000)

    async def main() -> None:
        workspace = Workspace(CONFIG)
        with pytest.raises(
            DataError, match="the box does not take the row's files: the archive cannot be unpacked"
        ):
            await workspace.start(archive=str(tmp_path / "no.tar"))
        await workspace.close()

    trio.run(main)


def test_at_most_max_boxes_are_open_and_waiting_attempts_get_the_places_of_those_that_ended() -> None:
    log: list[str] = []

    async def attempt(name: str, is_open: trio.Event, goes_on: trio.Event) -> None:
        workspace = Workspace({"max_boxes": 1, "command_timeout_s": 29.0})
        try:
            await workspace.start()
            log.append(f"{name} begins")
            is_open.set()
            await goes_on.wait()
        finally:
            log.append(f"{name} ends")
            await workspace.close()

    async def main() -> None:
        first, second, goes_on = trio.Event(), trio.Event(), trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(attempt, "first", first, goes_on)
            await first.wait()
            nursery.start_soon(attempt, "second", second, goes_on)
            await trio.testing.wait_all_tasks_blocked()
            assert not second.is_set()
            goes_on.set()

    trio.run(main)
    assert log == ["first begins", "first ends", "second begins", "second ends"]
