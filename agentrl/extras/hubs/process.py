"""A hub process: a program in an interpreter of its own, which answers calls.

The package of a world may need other versions than this one. Its program then runs in the environment where
the package is installed. `inside/agentrl_hub.py` is the other end of the pipes: one JSON message per line.

    start      at the first call; the next call after a death starts the program again
    owner      an asyncio task of the loop that made the first call; it ends with the loop
    blocked    a program that does not hear of a cancelled call is ended: it would answer nobody else either
    end        the input is closed, the program cleans up, and the guard kills all that is left of it
    kill -9    of this process ends the program too: it reads the end of its input, and the guard sees it
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import agentrl.guard
from agentrl.errors import DataError, EnvironmentFailed
from agentrl.extras.hubs.shared import shared
from agentrl.plugins.blame import RaisedElsewhere
from agentrl.types import Failure, JsonObject

log = logging.getLogger(__name__)

INSIDE = Path(__file__).with_name("inside")
MAX_MESSAGE_BYTES = 2**26
CLEAN_UP_S = 2.0
"""Seconds that a program gets to clean up after the end of its input, before all of it is killed."""
KILL_S = 5.0
"""Seconds to wait for a killed program; only one stuck in the kernel takes that long."""
CANCELLED_START_S = 0.5
"""Seconds to wait for a start that was cancelled."""
UNHEARD_S = 60.0
"""Seconds in which a program must hear that a call was cancelled. If its code blocks, it hears nothing."""
MAX_SHOWN_LINES = 3
"""Lines at the end of a program's stderr that an error shows."""


@dataclass(frozen=True, slots=True)
class HubProgram:
    """What a hub process runs. Equal programs of one event loop share a process.

    Attributes:
        label: names it in errors.
        python: the interpreter of the environment with the world's package.
        script: a file of `inside/`.
        variables: environment variables, all that it gets.
        start_timeout_s: deadline of a start: imports of such packages take seconds.
    """

    label: str
    python: str
    script: str
    variables: tuple[tuple[str, str], ...] = ()
    start_timeout_s: float = 120.0


def hub_process(program: HubProgram) -> HubProcess:
    """Return the running event loop's process of a program, started or not."""
    return shared(program, lambda: HubProcess(program))


class HubProcess:
    """A program that is started when it is needed. Calls run side by side; the caller has the deadline."""

    def __init__(self, program: HubProgram) -> None:
        self._program = program
        self._life: _Life | None = None

    async def call(self, name: str, arguments: JsonObject) -> Any:
        """Return the program's answer. A caller that is cancelled cancels the call in the program.

        Raises:
            DataError: the program refused the arguments.
            EnvironmentFailed: it cannot be started, raised, or died.
        """
        if self._life is None or self._life.is_over:
            self._life = _Life(self._program)
        return await self._life.call(name, arguments)

    @property
    def is_running(self) -> bool:
        """Whether the program was started and has not ended."""
        return self._life is not None and not self._life.is_over

    async def close(self) -> None:
        """End the program if it runs. Running calls fail."""
        if self._life is not None:
            await self._life.close()


class _Life:
    """One process, from its start to its end. All callers of one start share its failure."""

    def __init__(self, program: HubProgram) -> None:
        self._program = program
        self._ids = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._last_lines: deque[str] = deque(maxlen=MAX_SHOWN_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unheard: dict[int, asyncio.TimerHandle] = {}
        self._closing, self._blocked = asyncio.Event(), asyncio.Event()
        self.is_over = False
        self._owner = asyncio.create_task(self._own(), name=f"owner of {program.label}")

    async def call(self, name: str, arguments: JsonObject) -> Any:
        await asyncio.shield(self._ready)
        if self.is_over:
            raise EnvironmentFailed(f"{self._program.label} is not running")
        id = next(self._ids)
        answer = self._answers[id] = asyncio.get_running_loop().create_future()
        try:
            self._send({"id": id, "call": name, "arguments": dict(arguments)})
            return await answer
        except asyncio.CancelledError:
            if not self.is_over:
                self._send({"cancel": id})
                loop = asyncio.get_running_loop()
                self._unheard[id] = loop.call_later(UNHEARD_S, self._blocked.set)
            raise
        finally:
            self._answers.pop(id, None)

    async def close(self) -> None:
        self._closing.set()
        await asyncio.wait({self._owner})

    async def _own(self) -> None:
        reason = "was ended"
        try:
            self._process = await self._start()
            reason = await self._serve(self._process)
        except OSError as error:
            reason = f"cannot be started with {self._program.python!r}: {error.strerror}"
        finally:
            self.is_over = True
            for unheard in self._unheard.values():
                unheard.cancel()
            try:
                if self._process is not None:
                    await _end(self._process)
            finally:
                self._fail(f"{self._program.label} {reason}{self._shown_lines()}")

    async def _serve(self, process: asyncio.subprocess.Process) -> str:
        """Read answers until the program ends or must be ended; return why it ended."""
        reading = asyncio.create_task(self._read(process))
        logging_ = asyncio.create_task(self._log(process))
        closing = asyncio.create_task(self._closing.wait())
        blocked = asyncio.create_task(self._blocked.wait())
        try:
            first: set[asyncio.Future[Any]] = {reading, closing, self._ready}
            await asyncio.wait(
                first,
                timeout=self._program.start_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not (self._ready.done() or reading.done() or closing.done()):
                return f"was not ready within {self._program.start_timeout_s:g} s"
            await asyncio.wait({reading, closing, blocked}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                unheard = f"did not hear for {UNHEARD_S:g} s that a call was cancelled: its code blocks"
                return "was closed" if closing.done() else unheard
            await asyncio.wait({logging_}, timeout=0.2)  # its last words; a grandchild may hold the pipe
            return reading.result()
        finally:
            for task in (reading, logging_, closing, blocked):
                task.cancel()

    async def _read(self, process: asyncio.subprocess.Process) -> str:
        """Take answers until the output ends; return why."""
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:
                return f"answered more than {MAX_MESSAGE_BYTES} bytes"
            if not line:
                with suppress(TimeoutError):
                    async with asyncio.timeout(1.0):  # the pipe closes before the exit status is there
                        return f"ended with status {await process.wait()}"
                return "closed its output"
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError):
                return f"answered something else than its protocol: {line[:80]!r}"

    def _take(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            if not self._ready.done():
                self._ready.set_result(None)
            return
        if "cancelled" in message:
            self._unheard.pop(message["cancelled"]).cancel()
            return
        answer = self._answers.get(message["id"])
        if answer is None or answer.done():  # the caller has gone
            return
        if (error := message.get("error")) is None:
            answer.set_result(message["result"])
        elif error["kind"] == "refused":
            answer.set_exception(DataError(error["text"]))
        else:
            answer.set_exception(_raised(self._program.label, error))

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        # Not drained: answers are awaited, so what is unsent is bounded by the calls in flight.
        self._process.stdin.write(json.dumps(message, allow_nan=False).encode() + b"\n")

    def _fail(self, reason: str) -> None:
        for waiting in (self._ready, *self._answers.values()):
            if not waiting.done():
                waiting.set_exception(EnvironmentFailed(reason))
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # nobody may wait for it

    async def _start(self) -> asyncio.subprocess.Process:
        """Start the program. If the loop ends meanwhile, its task is cancelled with all others."""
        starting = asyncio.create_task(self._spawn())
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # A process whose pipes were not connected when its task was cancelled is killed, and asyncio then
            # waits for its pipes to close, for ever.
            await asyncio.wait({starting}, timeout=CANCELLED_START_S)
            starting.cancel()
            with suppress(asyncio.CancelledError, OSError):
                self._process = await starting
            raise

    async def _spawn(self) -> asyncio.subprocess.Process:
        program = self._program
        guard = ["-P", agentrl.guard.__file__, "--parent-pid", str(os.getpid()), "--whole-tree", "--"]
        return await asyncio.create_subprocess_exec(
            *(sys.executable, *guard, program.python, str(INSIDE / program.script)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(program.variables),
            limit=MAX_MESSAGE_BYTES,
            start_new_session=True,
        )

    async def _log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        async for line in _lines(process.stderr):
            self._last_lines.append(line)
            log.info("%s: %s", self._program.label, line)

    def _shown_lines(self) -> str:
        return f"; it wrote: {' | '.join(self._last_lines)}" if self._last_lines else ""


async def _lines(stream: asyncio.StreamReader) -> Any:
    """Yield the lines that are not empty; of a very long one, pieces."""
    rest = b""
    while piece := await stream.read(2**16):
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > 2**16:
            lines, rest = [*lines, rest], b""
        for line in lines:
            if text := line.decode(errors="replace").rstrip():
                yield text
    if text := rest.decode(errors="replace").rstrip():
        yield text


async def _end(process: asyncio.subprocess.Process) -> None:
    """Close the input of a program, and have the guard kill what has not ended soon."""
    assert process.stdin is not None
    process.stdin.close()
    for seconds, harm in ((CLEAN_UP_S, process.terminate), (KILL_S, process.kill), (KILL_S, None)):
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await process.wait()
                return
        if harm is not None:
            with suppress(ProcessLookupError):
                harm()


def _raised(label: str, error: Mapping[str, str]) -> EnvironmentFailed:
    """Return what the program raised, with the place in the user's file there."""
    failed = EnvironmentFailed(f"{label} raised {error['type']}: {error['text']}")
    there = Failure(error["text"], None, error["type"], error["place"], error["traceback"])
    failed.__cause__ = RaisedElsewhere(there)
    return failed
