"""Boxes of processes by the protocol: files, snapshots, cancellation, and what a killed run leaves."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.boxes import BoxEnded, BoxFileMissing, BoxRefused, OpenBox, Start
from agentrl.boxes.edits import replaced
from agentrl.boxes.inside.servant import Kept
from agentrl.boxes.process_box import ProcessBoxes
from agentrl.plugins import WrongCall
from agentrl.sandbox import Limits, Sandbox, SandboxOptions

MAKER = ProcessBoxes(Sandbox(SandboxOptions(Limits(wall_s=300.0, cpu_s=60.0, max_processes=64))))
OUTPUT = {"timeout_s": 60.0, "max_output_bytes": 10_000}


def in_box(main: Callable[[OpenBox], Awaitable[object]], start: Start | None = None) -> None:
    async def whole() -> None:
        box = await MAKER.start(start or Start())
        try:
            await main(box)
        finally:
            await box.stop()
            await box.stop()

    trio.run(whole)


def test_a_snapshot_is_the_folder_and_a_box_that_starts_from_it_has_the_same() -> None:
    async def main(box: OpenBox) -> None:
        await box.write("src/deep/a.py", b"\0\xff")
        await box.run(
            ["bash", "-c", "chmod +x src/deep/a.py; ln -s src link; mkfifo pipe; mkdir empty"], **OUTPUT
        )
        snapshot = await box.snapshot(max_bytes=2**20)
        with pytest.raises(BoxRefused, match="more than 1 bytes"):
            await box.snapshot(max_bytes=1)

        async def second(copy: OpenBox) -> None:
            assert await copy.read("link/deep/a.py", max_bytes=2) == b"\0\xff"
            assert await copy.snapshot(max_bytes=2**20) == snapshot
            listed = await copy.run(["bash", "-c", "ls; test -x src/deep/a.py"], **OUTPUT)
            assert (listed.stdout.split(), listed.exit_code) == (["empty", "link", "src"], 0)

        other = await MAKER.start(Start(snapshot=snapshot))
        try:
            await second(other)
        finally:
            await other.stop()

    in_box(main)


def test_what_cannot_be_done_is_refused_and_the_box_goes_on() -> None:
    async def main(box: OpenBox) -> None:
        with pytest.raises(BoxFileMissing, match="no such file: missing"):
            await box.read("missing", max_bytes=10)
        with pytest.raises(BoxRefused, match="Is a directory"):
            await box.read("/", max_bytes=10)
        await box.run(["mkfifo", "pipe"], **OUTPUT)
        for path in ("pipe", "/dev/zero"):
            with pytest.raises(BoxRefused, match="it is not a plain file"):
                await box.read(path, max_bytes=10)
        await box.write("long", b"x" * 11)
        with pytest.raises(BoxRefused, match="it has more than 10 bytes"):
            await box.read("long", max_bytes=10)
        with pytest.raises(BoxRefused, match="no such file: no-command"):
            await box.run(["no-command"], **OUTPUT)
        # Outputs apart, a signal as a shell counts it, and nobody waits for what is left in the background.
        ended = await box.run(
            ["bash", "-c", "sleep 999 & cat; echo no >&2; kill -9 $$"], stdin=b"in", **OUTPUT
        )
        assert (ended.stdout, ended.stderr, ended.exit_code) == ("in", "no\n", 137)

    in_box(main)


def test_the_answer_to_a_cancelled_request_is_not_taken_for_that_to_the_next() -> None:
    async def main(box: OpenBox) -> None:
        with trio.move_on_after(0.2) as scope:
            await box.run(["sleep", "1"], **OUTPUT)
        assert scope.cancelled_caught
        assert (await box.run(["echo", "next"], **OUTPUT)).stdout == "next\n"

    in_box(main)


def test_a_stopped_box_answers_no_more() -> None:
    async def main(box: OpenBox) -> None:
        await box.stop()
        with pytest.raises(BoxEnded, match="the box was stopped"):
            await box.run(["true"], **OUTPUT)

    in_box(main)


KILLED = """
import sys, trio
from agentrl.boxes.workspace import Workspace

async def main():
    workspace = Workspace({})
    await workspace.start()
    sleep = f"exec -a {sys.argv[1]} sleep 9999"
    await workspace.bash(f"({sleep}) & setsid -f bash -c '{sleep}'")
    print("ready", flush=True)
    await workspace.bash(sleep)

trio.run(main)
"""


def named(name: str) -> list[str]:
    """Return the processes with this name as their first argument."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(name.encode()):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def test_a_killed_run_leaves_nothing_running() -> None:
    name = f"box-{secrets.token_hex(8)}"
    with subprocess.Popen([sys.executable, "-c", KILLED, name], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            assert len(named(name)) >= 2
        finally:
            process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while named(name) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert named(name) == []


@given(st.lists(st.binary(max_size=50)), st.integers(2, 40))
@settings(max_examples=100)
def test_the_beginning_and_the_end_of_an_output_are_kept(pieces: list[bytes], most: int) -> None:
    kept, whole = Kept(most), b"".join(pieces)
    for piece in pieces:
        kept.add(piece)
    half = max(1, most // 2)
    assert kept.num_lost == max(0, len(whole) - 2 * half)
    if kept.num_lost:
        assert kept.value().startswith(whole[:half])
        assert kept.value().endswith(whole[-half:])
    else:
        assert kept.value() == whole


@given(st.text("ab\n ", max_size=12), st.text("ab\n ", max_size=3), st.text("ab\n ", max_size=3))
@settings(max_examples=200)
def test_an_edit_replaces_what_is_there_once_and_is_refused_otherwise(text: str, old: str, new: str) -> None:
    if old and old != new and text.count(old) == 1:
        before, after = text.split(old)
        assert replaced(text, old, new, path="a") == before + new + after
    else:
        with pytest.raises(WrongCall):
            replaced(text, old, new, path="a")


@pytest.mark.parametrize(
    ("text", "old", "part"),
    [
        ("a\nb\na\n", "a", "contains `old` 2 times (lines 1, 3): include lines around it"),
        ("if x:\n    return 1\n", "if x:\n  return 1", "lines 1 to 2 differ from it in white space only"),
        ("def total(items):\n", "def totals(item):", "the line most like it is line 1: 'def total(items):'"),
        ("a\n", "", "a.py exists: `old` must be a part of it that is replaced, or all of it"),
        ("z\n", "z", "equal"),
    ],
)
def test_a_refused_edit_says_how_to_correct_it(text: str, old: str, part: str) -> None:
    with pytest.raises(WrongCall) as refused:
        replaced(text, old, "z", path="a.py")
    assert part in str(refused.value)
