"""Boxes that a servant answers for: a program inside takes requests of the host over two pipes."""

from __future__ import annotations

import itertools
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import trio

from agentrl.errors import SandboxError
from agentrl.extras.boxes.box import BoxEnded, BoxFileMissing, BoxRefused, Executed, OpenBox, Start

SERVANT = (Path(__file__).parent / "inside" / "servant.py").read_text(encoding="utf-8")
ANSWER_S = 30.0
"""Seconds that an answer may take beyond a command's own time."""
STOP_S = 10.0
MAX_HEAD_BYTES = 2**20
MAX_BODY_BYTES = 2**30


class Place(Protocol):
    """Where a servant runs. Its methods block, and may be called from any thread."""

    def wait(self, timeout_s: float) -> str | None:
        """Wait for the end; return why it ended ("" if unknown), or None if the servant still runs.

        Raises:
            SandboxError: the place itself broke.
        """

    def stop(self, timeout_s: float) -> None:
        """Kill all processes of the place, and wait until they have ended. Safe to call again.

        Raises:
            SandboxError: they have not ended after `timeout_s`.
        """


class AskedBox(OpenBox):
    """A box that is asked in the verbs of the servant, however a request reaches it."""

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

    async def restore(self, snapshot: bytes) -> None:
        await self._ask("unpack", snapshot)

    @abstractmethod
    async def _ask(
        self, verb: str, body: bytes = b"", *, within_s: float = 0.0, **fields: Any
    ) -> tuple[Mapping[str, Any], bytes]:
        """Send a request and return its answer, which may take `within_s` and some time more.

        Raises:
            BoxRefused: what was asked cannot be done. BoxEnded: the box is over. SandboxError: it broke.
        """


class ServedBox(AskedBox):
    """A box whose servant reads requests from one pipe and writes answers to another. `stop` closes both."""

    def __init__(self, place: Place, *, requests: int, answers: int) -> None:
        self._place = place
        self._requests = trio.lowlevel.FdStream(requests)
        self._answers = trio.lowlevel.FdStream(answers)
        self._received = bytearray()
        self._ids = itertools.count()
        self._turn = trio.Lock()
        self._over: str | None = None

    async def fill(self, start: Start) -> None:
        await self._ask("greet")  # a servant that cannot work tells so now, not at the model's first command
        await super().fill(start)

    async def stop(self) -> None:
        self._over = self._over or "the box was stopped"
        with trio.CancelScope(shield=True):
            await self._requests.aclose()
            await self._answers.aclose()
            await trio.to_thread.run_sync(self._place.stop, STOP_S)

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
                    await self._send(framed(head, body))
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
            frame = bytes(self._received[: 8 + num_head + num_body])
            del self._received[: 8 + num_head + num_body]
            head, body = read_frame(frame)
            if head.get("id") == number:
                return head, body

    async def _receive(self, size: int) -> None:
        """Wait until `size` bytes are there. A cancellation loses none of them."""
        while len(self._received) < size:
            if not (piece := await self._answers.receive_some(2**18)):
                raise EOFError
            self._received += piece

    async def _ended(self, why: str, *, wait_s: float = STOP_S) -> BoxEnded:
        """Stop a box that no longer answers, and return the error that says so.

        Raises:
            SandboxError: the place itself broke.
        """
        ended = await trio.to_thread.run_sync(self._place.wait, wait_s)
        self._over = f"the box is over, and its files are gone: {ended or why}"
        await self.stop()
        return BoxEnded(self._over)


async def filled(box: OpenBox, start: Start) -> OpenBox:
    """Write what a fresh box starts from, and return it. If this fails, the box is stopped.

    Raises:
        BoxRefused: the box does not take it. SandboxError: it broke.
    """
    try:
        await box.fill(start)
    except BaseException as error:
        with trio.CancelScope(shield=True):
            await box.stop()
        if isinstance(error, BoxEnded):  # nothing of the model has run yet
            raise SandboxError(f"while it started, {error}") from error
        raise
    return box


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


def framed(head: bytes, body: bytes) -> bytes:
    """Return a frame: two lengths of 4 bytes, a JSON object, a body."""
    return len(head).to_bytes(4, "big") + len(body).to_bytes(4, "big") + head + body


def read_frame(frame: bytes) -> tuple[Mapping[str, Any], bytes]:
    """Return the JSON object and the body of a whole frame. Raises ValueError."""
    num_head = int.from_bytes(frame[:4], "big")
    head = json.loads(frame[8 : 8 + num_head])
    if not isinstance(head, dict):
        raise ValueError("its answer cannot be read")
    return head, frame[8 + num_head :]
