"""Boxes of processes: one sandboxed program per box (docs/sandbox.md) answers the requests of the host."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trio

from agentrl.boxes.box import BoxEnded, BoxFileMissing, BoxMaker, BoxRefused, Executed, OpenBox, Start
from agentrl.errors import DataError, SandboxError
from agentrl.sandbox import Program, RunningProgram, Sandbox

SERVANT = (Path(__file__).parent / "inside" / "servant.py").read_text(encoding="utf-8")
ANSWER_S = 30.0
"""Seconds that an answer may take beyond a command's own time."""
STOP_S = 10.0
MAX_HEAD_BYTES = 2**20
MAX_BODY_BYTES = 2**30


class ProcessBoxes(BoxMaker):
    """Starts boxes within the limits of `sandbox`. Its `wall_s` and `cpu_s` are those of a whole box."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def check(self) -> None:
        self._sandbox.check()

    async def start(self, start: Start) -> OpenBox:
        if start.image is not None:
            raise DataError(
                f"image {start.image!r}: boxes of kind 'process' have no images; use kind: docker or podman"
            )
        requests, answers = os.pipe(), os.pipe()
        program = Program(SERVANT, commands=True)
        try:
            running = self._sandbox.start(program, channel=(requests[0], answers[1]))
        except BaseException:
            os.close(requests[1])
            os.close(answers[0])
            raise
        box = ProcessBox(running, requests=requests[1], answers=answers[0])
        try:
            await box.fill(start)
        except BaseException as error:
            with trio.CancelScope(shield=True):
                await box.stop()
            if isinstance(error, BoxEnded):  # nothing of the model has run yet
                raise SandboxError(f"while it started, {error}") from error
            raise
        return box


class ProcessBox(OpenBox):
    """A box whose processes live in the walls of one sandboxed program, and end with it."""

    def __init__(self, running: RunningProgram, *, requests: int, answers: int) -> None:
        self._running = running
        self._requests = trio.lowlevel.FdStream(requests)
        self._answers = trio.lowlevel.FdStream(answers)
        self._received = bytearray()
        self._ids = itertools.count()
        self._turn = trio.Lock()
        self._over: str | None = None

    async def fill(self, start: Start) -> None:
        """Write what the box starts from."""
        if start.snapshot is not None:
            await self._ask("unpack", start.snapshot)
        for path, content in start.files.items():
            await self.write(path, content)

    async def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        max_output_bytes: int,
        stdin: bytes = b"",
        is_merged: bool = False,
    ) -> Executed:
        head, body = await self._ask(
            "run",
            stdin,
            within_s=timeout_s,
            command=list(command),
            timeout_s=timeout_s,
            max_output_bytes=max_output_bytes,
            is_merged=is_merged,
        )
        return executed(head, body)

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        return (await self._ask("read", path=path, max_bytes=max_bytes))[1]

    async def write(self, path: str, content: bytes) -> None:
        await self._ask("write", content, path=path)

    async def snapshot(self, *, max_bytes: int) -> bytes:
        return (await self._ask("pack", max_bytes=max_bytes))[1]

    async def stop(self) -> None:
        self._over = self._over or "the box was stopped"
        with trio.CancelScope(shield=True):
            await self._requests.aclose()
            await self._answers.aclose()
            await trio.to_thread.run_sync(self._running.stop, STOP_S)

    async def _ask(
        self, verb: str, body: bytes = b"", *, within_s: float = 0.0, **fields: Any
    ) -> tuple[Mapping[str, Any], bytes]:
        """Send a request and return its answer.

        Raises:
            BoxRefused: what was asked cannot be done. BoxEnded: the box is over. SandboxError: it broke.
        """
        async with self._turn:
            if self._over is not None:
                raise BoxEnded(self._over)
            number = next(self._ids)
            head = json.dumps({"id": number, "verb": verb, **fields}).encode()
            with trio.move_on_after(within_s + ANSWER_S):
                try:
                    await self._send(_lengths(head, body) + head + body)
                    found = await self._answer(number)
                except (trio.BrokenResourceError, trio.ClosedResourceError, EOFError) as error:
                    raise await self._ended("a command killed its own process") from error
                except ValueError as error:
                    raise await self._ended(str(error), wait_s=0.0) from error
                if "refused" in found[0]:
                    refused = BoxFileMissing if found[0].get("is_missing") else BoxRefused
                    raise refused(str(found[0]["refused"]))
                return found
            raise await self._ended(f"it did not answer for {within_s + ANSWER_S:g} s", wait_s=0.0)

    async def _send(self, frame: bytes) -> None:
        self._over = "the box is over: a request was interrupted"  # half a frame cannot be completed later
        await self._requests.send_all(frame)
        self._over = None

    async def _answer(self, number: int) -> tuple[Mapping[str, Any], bytes]:
        """Return the answer to request `number`. Older answers are of requests that were cancelled.

        Raises:
            ValueError: what the box sent is no answer. EOFError: it has ended.
        """
        while True:
            await self._receive(8)
            num_head = int.from_bytes(self._received[:4], "big")
            num_body = int.from_bytes(self._received[4:8], "big")
            if num_head > MAX_HEAD_BYTES or num_body > MAX_BODY_BYTES:
                raise ValueError("its answer is too long")
            await self._receive(8 + num_head + num_body)
            frame = bytes(self._received[8 : 8 + num_head + num_body])
            del self._received[: 8 + num_head + num_body]
            head = json.loads(frame[:num_head])
            if not isinstance(head, dict):
                raise ValueError("its answer cannot be read")
            if head.get("id") == number:
                return head, frame[num_head:]

    async def _receive(self, size: int) -> None:
        """Wait until `size` bytes are there. A cancellation loses none of them."""
        while len(self._received) < size:
            if not (piece := await self._answers.receive_some(2**18)):
                raise EOFError
            self._received += piece

    async def _ended(self, why: str, *, wait_s: float = STOP_S) -> BoxEnded:
        """Stop a box that no longer answers, and return the error that says so.

        Raises:
            SandboxError: the sandbox itself broke.
        """
        ended = await trio.to_thread.run_sync(self._running.wait, wait_s)
        if ended is not None:
            why = ended.describe() or why
        self._over = f"the box is over, and its files are gone: {why}"
        await self.stop()
        return BoxEnded(self._over)


def executed(head: Mapping[str, Any], body: bytes) -> Executed:
    """Return the result that the servant told. What ran in the box may have told it something else."""
    try:
        num_stdout = int(head["num_stdout"])
        return Executed(
            exit_code=int(head["exit_code"]),
            stdout=body[:num_stdout].decode("utf-8", "replace"),
            stderr=body[num_stdout:].decode("utf-8", "replace"),
            is_truncated=bool(head["is_truncated"]),
            is_timed_out=bool(head["is_timed_out"]),
            wall_s=float(head["wall_s"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BoxEnded(f"the box's answer cannot be read: {error}") from error


def _lengths(head: bytes, body: bytes) -> bytes:
    return len(head).to_bytes(4, "big") + len(body).to_bytes(4, "big")
