"""Runs checks, each in a process group of its own that is killed at its deadline.

A check touches what may be broken: a disk that never answers, a GPU driver, a server, a library that crashes
when it is imported. Nothing of that may end or delay the other checks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO

import trio

from agentrl.extras.doctor.checks import CLUSTER, Check
from agentrl.extras.doctor.diagnosis import Diagnosis
from agentrl.extras.doctor.subject import Subject
from agentrl.granted import granted_cpus
from agentrl.servers.trio_run import in_trio

LAST_LINE = "end"
"""What the process of a check writes after its last diagnosis."""
END_GRACE_S = 5.0
"""To close what a check has opened."""
KILL_GRACE_S = 2.0
"""A process that waits for a dead disk cannot be killed; nobody waits longer for it."""
DEBUG = "AGENTRL_DEBUG"

OnDone = Callable[[Check, Sequence[Diagnosis]], None]


def examine(
    subject: Subject, checks: Sequence[Check], *, on_done: OnDone | None = None, of_nodes: Sequence[str] = ()
) -> list[Diagnosis]:
    """Run the checks and return their diagnoses, in the order of `checks`.

    Checks that measure speed run one after the other, then the others side by side.

    Args:
        on_done: called after each check.
        of_nodes: names of the checks that the check `cluster` runs on every node.
    """
    found: dict[str, list[Diagnosis]] = {}
    given = subject.as_json().encode()

    async def one(check: Check) -> None:
        found[check.name] = await _run(check, given, of_nodes if check == CLUSTER else ())
        if on_done is not None:
            on_done(check, found[check.name])

    async def side_by_side(check: Check, limiter: trio.CapacityLimiter) -> None:
        async with limiter:
            await one(check)

    async def main() -> None:
        for check in checks:
            if check.is_alone:
                await one(check)
        limiter = trio.CapacityLimiter(max(2, granted_cpus() // 2))
        async with trio.open_nursery() as nursery:
            for check in checks:
                if not check.is_alone:
                    nursery.start_soon(side_by_side, check, limiter)

    in_trio(main)
    return [diagnosis for check in checks for diagnosis in found[check.name]]


async def _run(check: Check, given: bytes, options: Sequence[str]) -> list[Diagnosis]:
    command = [sys.executable, "-m", "agentrl.extras.doctor", check.name, check.module, *options]
    with tempfile.TemporaryFile() as errors:
        process = await trio.lowlevel.open_process(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        lines: list[str] = []
        try:
            with trio.move_on_after(check.deadline_s) as scope:
                await _read(process, given, lines)
        finally:
            await _end(process, is_done=LAST_LINE in lines)
        diagnoses = [Diagnosis.parse(line) for line in lines if line != LAST_LINE]
        if LAST_LINE not in lines:
            why = (
                f"gave no answer within {check.deadline_s:g} s"
                if scope.cancelled_caught
                else f"its process {_ending(process.returncode)}: {_tail(errors) or 'no message'}"
            )
            diagnoses.append(_unfinished(check, why))
        if os.environ.get(DEBUG):
            errors.seek(0)
            sys.stderr.write(errors.read().decode(errors="replace"))
    return diagnoses


async def _read(process: trio.Process, given: bytes, lines: list[str]) -> None:
    """Send the subject; append the lines of the process until the last one, or until it closes the pipe."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(trio.BrokenResourceError):  # it died at once
        await process.stdin.send_all(given)
        await process.stdin.aclose()
    rest = b""
    while LAST_LINE not in lines and (piece := await process.stdout.receive_some()):
        *whole, rest = (rest + piece).split(b"\n")
        lines += [line.decode() for line in whole]


async def _end(process: trio.Process, *, is_done: bool) -> None:
    """End the process with all that it started: servers, and programs that outlived their use."""
    with trio.CancelScope(shield=True):
        with trio.move_on_after(END_GRACE_S):
            if not is_done:
                process.terminate()  # it removes its files
            await process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with trio.move_on_after(KILL_GRACE_S):
            await process.wait()


def _unfinished(check: Check, why: str) -> Diagnosis:
    return Diagnosis(
        check.name, "wrong", why, f"`agentrl doctor --only {check.name} --debug` shows its own messages"
    )


def _ending(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"exited with status {status}"


def _tail(file: IO[bytes]) -> str:
    file.seek(0)
    lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""
