"""Boxes that are machines of a cloud. Each request of a box is a program that a client runs there."""

from __future__ import annotations

import base64
import json
import shlex
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import trio

from agentrl.errors import SandboxError
from agentrl.extras.boxes.box import BoxEnded, BoxFileMissing, BoxRefused, Start
from agentrl.extras.boxes.served_box import ANSWER_S, SERVANT, AskedBox, framed, read_frame

T = TypeVar("T")

MAX_INLINE_BYTES = 32 * 1024
"""Larger requests are written to a file first. Linux takes arguments of 128 KiB, the servant among them."""
MAX_CALLS = 256
"""Calls of clients that block a thread each, in this process."""

_threads = trio.CapacityLimiter(MAX_CALLS)


class MachineGone(Exception):
    """The cloud has no such machine any more: its time was over, or it was ended from inside."""


class Machine(Protocol):
    """One machine of a cloud. Its methods block, and may be called from any thread.

    They raise MachineGone, or SandboxError if the cloud broke. Paths and commands begin in the home folder.
    """

    def run(self, command: str, *, timeout_s: float) -> str | None:
        """Run a line of a shell; return its standard output, None if it failed or reached its deadline."""

    def write(self, path: str, content: bytes) -> None:
        """Write a file."""

    def read(self, path: str) -> bytes | None:
        """Return a file's content, None if there is no such file."""

    def end(self) -> None:
        """End the machine. Safe to call again, also after it has gone."""


class MachineBox(AskedBox):
    """A working folder on a machine. Processes may outlive their command, and end with the machine."""

    def __init__(self, machine: Machine, *, folder: str) -> None:
        self._machine = machine
        self._folder = folder
        self._turn = trio.Lock()
        self._over: str | None = None
        self._has_run = False

    async def fill(self, start: Start) -> None:
        try:  # an image without python3 tells so now, not at the model's first command
            await self._ask("greet")
        except BoxEnded as error:
            raise SandboxError(f"{error} (a machine needs python3, 3.8 or newer)") from error
        await super().fill(start)

    async def stop(self) -> None:
        self._over = self._over or "the box was stopped"
        with trio.CancelScope(shield=True):
            await call(self._machine.end)

    async def _ask(
        self, verb: str, body: bytes = b"", *, within_s: float = 0.0, **fields: Any
    ) -> tuple[Mapping[str, Any], bytes]:
        """Send a request and return its answer. What a cancelled request began goes on until its deadline.

        Raises:
            BoxRefused: what was asked cannot be done. BoxEnded: the box is over.
            SandboxError: the cloud broke.
        """
        async with self._turn:
            if self._over is not None:
                raise BoxEnded(self._over)
            self._has_run |= verb == "run"
            frame = framed(json.dumps({"verb": verb, **fields}).encode(), body)
            try:
                with trio.fail_after(within_s + 3 * ANSWER_S):  # a request, a command, an answer
                    answer, content = await self._played(frame, timeout_s=within_s + ANSWER_S)
            except trio.TooSlowError as error:
                raise SandboxError("the cloud of the box did not answer in time") from error
            except MachineGone as error:
                self._over = f"the box is over, and its files are gone: {error}"
                if not self._has_run:  # nothing in it can have ended it
                    raise SandboxError(self._over) from error
                raise BoxEnded(self._over) from error
            except ValueError as error:
                self._over = "the box is over: a command destroyed its answer"
                await self.stop()
                raise BoxEnded(self._over) from error
        if "refused" in answer:
            raise (BoxFileMissing if answer.get("is_missing") else BoxRefused)(str(answer["refused"]))
        return answer, content

    async def _played(self, frame: bytes, *, timeout_s: float) -> tuple[Mapping[str, Any], bytes]:
        """Run the servant with a request. Raises ValueError if what it tells is no answer."""
        request = base64.b64encode(frame).decode()
        if len(frame) > MAX_INLINE_BYTES:
            path = f"/tmp/agentrl-request-{uuid.uuid4().hex}"
            await call(lambda: self._machine.write(path, frame))
            request = f"@{path}"
        command = shlex.join(["python3", "-c", SERVANT, "stay", self._folder, request])
        told = await call(lambda: self._machine.run(command, timeout_s=timeout_s))
        if told is None:
            raise ValueError("the servant failed")
        told = told.strip()
        if not told.startswith("@"):
            return read_frame(base64.b64decode(told, validate=True))
        frame_told = await call(lambda: self._machine.read(told[1:]))
        if frame_told is None:
            raise ValueError("its answer is not there any more")
        return read_frame(frame_told)


async def call(method: Callable[[], T]) -> T:
    """Call a blocking method in a thread. If this is cancelled, the thread is left to itself."""
    return await trio.to_thread.run_sync(method, abandon_on_cancel=True, limiter=_threads)
