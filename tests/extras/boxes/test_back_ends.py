"""What holds for boxes of every kind: files, snapshots, deadlines, cancellation, and what a box leaves."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Awaitable, Callable

import pytest
import trio

from agentrl.extras.boxes import BoxEnded, BoxFileMissing, BoxMaker, BoxRefused, OpenBox, Start
from parts.box_kinds import LIVING, MAKERS, named

OUTPUT = {"timeout_s": 60.0, "max_output_bytes": 10_000}


SLOW = ("bubblewrap_image", "podman")
"""Kinds whose image is made first."""


def of_kinds(makers: dict[str, Callable[[], BoxMaker]]) -> list[object]:
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in sorted(makers)]


@pytest.fixture(params=of_kinds(MAKERS), scope="module")
def maker(request: pytest.FixtureRequest) -> BoxMaker:
    made = MAKERS[request.param]()
    made.check()
    return made


@pytest.fixture(params=of_kinds(LIVING), scope="module")
def living(request: pytest.FixtureRequest) -> BoxMaker:
    made = LIVING[request.param]()
    made.check()
    return made


def in_box(maker: BoxMaker, main: Callable[[OpenBox], Awaitable[object]], start: Start | None = None) -> None:
    async def whole() -> None:
        box = await maker.start(start or Start())
        try:
            await main(box)
        finally:
            await box.stop()
            await box.stop()

    trio.run(whole)


def test_a_snapshot_is_the_folder_and_a_box_that_starts_from_it_has_the_same(maker: BoxMaker) -> None:
    async def main(box: OpenBox) -> None:
        await box.write("src/deep/a.py", b"\0\xff")
        await box.run(
            ["bash", "-c", "chmod +x src/deep/a.py; ln -s src link; mkfifo pipe; mkdir empty"], **OUTPUT
        )
        snapshot = await box.snapshot(max_bytes=2**20)
        with pytest.raises(BoxRefused, match="more than 1 bytes"):
            await box.snapshot(max_bytes=1)
        other = await maker.start(Start(snapshot=snapshot))
        try:
            assert await other.read("link/deep/a.py", max_bytes=2) == b"\0\xff"
            assert await other.snapshot(max_bytes=2**20) == snapshot
            listed = await other.run(["bash", "-c", "ls; test -x src/deep/a.py"], **OUTPUT)
            assert (listed.stdout.split(), listed.exit_code) == (["empty", "link", "src"], 0)
        finally:
            await other.stop()
        # Restoring removes what came after the snapshot.
        await box.run(["bash", "-c", "rm -r empty; mkdir -p later/deep; echo > src/deep/a.py"], **OUTPUT)
        await box.restore(snapshot)
        assert await box.snapshot(max_bytes=2**20) == snapshot
        with pytest.raises(BoxRefused, match="the archive cannot be unpacked"):
            await box.restore(b"no archive" * 1000)
        assert await box.snapshot(max_bytes=2**20) == snapshot

    in_box(maker, main)


def test_what_cannot_be_done_is_refused_and_the_box_goes_on(maker: BoxMaker) -> None:
    async def main(box: OpenBox) -> None:
        with pytest.raises(BoxFileMissing, match="no such file: missing"):
            await box.read("missing", max_bytes=10)
        with pytest.raises(BoxRefused, match=r"[Ii]s a (directory|folder)"):
            await box.read("/", max_bytes=10)
        with pytest.raises(BoxRefused, match="it is not a plain file"):
            await box.read("/dev/zero", max_bytes=10)
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

    in_box(maker, main)


def test_a_command_ends_at_its_deadline_and_its_output_is_cut_in_the_middle(maker: BoxMaker) -> None:
    async def main(box: OpenBox) -> None:
        late = await box.run(
            ["bash", "-c", "echo begun; sleep 999"], timeout_s=0.5, max_output_bytes=100, is_merged=True
        )
        assert (late.stdout, late.is_timed_out) == ("begun\n", True)
        much = await box.run(["seq", "1", "100000"], timeout_s=60.0, max_output_bytes=100)
        assert much.is_truncated
        assert much.stdout.startswith("1\n2\n")
        assert much.stdout.endswith("\n100000\n")
        assert len(much.stdout) < 200

    in_box(maker, main)


def test_the_answer_to_a_cancelled_request_is_not_taken_for_that_to_the_next(maker: BoxMaker) -> None:
    async def main(box: OpenBox) -> None:
        with trio.move_on_after(0.2) as scope:
            await box.run(["sleep", "1"], **OUTPUT)
        assert scope.cancelled_caught
        assert (await box.run(["echo", "next"], **OUTPUT)).stdout == "next\n"

    in_box(maker, main)


def test_what_runs_in_a_box_is_nobody_and_reaches_no_server_of_the_node(living: BoxMaker) -> None:
    code = (
        "import os, socket, sys\n"
        "try:\n    socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n    print(True)\n"
        "except OSError:\n    print(False)\n"
        "print(open('/proc/self/status').read() if os.path.exists('/proc/self/status') else '')"
    )
    server = socket.create_server(("127.0.0.1", 0))

    async def main(box: OpenBox) -> None:
        done = await box.run(["python3", "-c", code, str(server.getsockname()[1])], **OUTPUT)
        assert done.stdout.startswith("False\n")
        status = dict(line.split(":", 1) for line in done.stdout.splitlines() if ":" in line)
        if status:  # there is /proc
            assert int(status["CapEff"], 16) == 0
            assert status["NoNewPrivs"].strip() == "1"

    with server:
        in_box(living, main)


def test_a_stopped_box_answers_no_more_and_leaves_no_process(living: BoxMaker) -> None:
    name = f"box-{secrets.token_hex(8)}"

    async def main(box: OpenBox) -> None:
        sleep = f"exec -a {name} sleep 9999"
        await box.run(
            ["bash", "-c", f"({sleep}) >/dev/null 2>&1 & setsid bash -c '{sleep}' >/dev/null 2>&1 &"],
            **OUTPUT,
        )
        deadline = time.monotonic() + 60
        while not named(name) and time.monotonic() < deadline:
            await trio.sleep(0.02)
        assert named(name)
        await box.stop()
        assert named(name) == []
        with pytest.raises(BoxEnded, match="the box was stopped"):
            await box.run(["true"], **OUTPUT)

    in_box(living, main)


def test_a_pipe_is_not_read(living: BoxMaker) -> None:
    async def main(box: OpenBox) -> None:
        await box.run(["mkfifo", "pipe"], **OUTPUT)
        with pytest.raises(BoxRefused, match="it is not a plain file"):
            await box.read("pipe", max_bytes=10)

    in_box(living, main)
