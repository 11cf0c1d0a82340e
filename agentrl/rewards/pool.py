"""Worker processes for rewards that are slow or may hang: one call at a time each, killed if its caller is
cancelled.

They are new interpreters, not forks: this process has threads, and a fork would inherit locks that no thread
releases.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import trio

from agentrl.errors import RewardError
from agentrl.plugins.blame import RaisedElsewhere
from agentrl.rewards.recipes import Recipe
from agentrl.rewards.worker import HEADER, MakeRequest, RehearseRequest, Reply, Request, RewardRequest, frame
from agentrl.types import Task

START_TIMEOUT_S = 120.0
"""Seconds to start an interpreter and import a reward's dependencies; minutes on a machine under load."""
KILL_TIMEOUT_S = 5.0
"""Seconds to wait for a killed process; only one stuck in the kernel takes that long."""
MAX_BYTES = 2**30
READ_BYTES = 2**16


SIGNALS_OF_AN_ANSWER = frozenset(
    {signal.SIGXCPU, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}
)
"""Signals that a computation can cause. SIGKILL and SIGTERM come from outside: not the answer's fault."""


class DeathError(RewardError):
    """A process ended during a call. `signal`: the signal that killed it, None if there was none."""

    def __init__(self, message: str, ended_by: int | None) -> None:
        super().__init__(message)
        self.signal = ended_by


class AnswerDeathError(RewardError):
    """The answer itself made the process that scored it die: the same process had scored the ground truth
    before.
    """


class WorkerPool:
    """At most `num_processes` workers, started on demand and kept. For one trio run; `aclose` ends them."""

    def __init__(self, num_processes: int) -> None:
        self._slots = trio.CapacityLimiter(num_processes)
        self._idle: list[_Worker] = []
        self._keys: dict[int, int] = {}  # id of a recipe -> its key
        self._recipes: list[Recipe] = []  # keeps them alive, so that no id is reused
        self._is_closed = False

    async def score(
        self, recipe: Recipe, subject: Any, *, begin: Callable[[], None], rehearse: Task | None = None
    ) -> Any:
        """Return the result of the reward's `score(subject)`. Calls `begin` once a worker is ready.

        If the call is cancelled, its worker is killed with all its children. With `rehearse`, the worker
        first rehearses the reward on that task.

        Raises:
            AnswerDeathError: scoring killed the process after the rehearsal had succeeded: the answer
                exceeded its resource limits, or crashed the interpreter.
            RewardError: the reward cannot be created there, it raised, or its process died.
        """
        key = self._key(recipe)
        async with self._slots:
            worker = self._idle.pop() if self._idle else _Worker()
            try:
                with trio.move_on_after(START_TIMEOUT_S) as starting:
                    await worker.prepare(key, recipe)
                if starting.cancelled_caught:
                    raise RewardError(f"the reward's process was not ready within {START_TIMEOUT_S:g} s")
                begin()
                if rehearse is not None:
                    await worker.ask(RehearseRequest(key, rehearse))
                try:
                    return await worker.ask(RewardRequest(key, subject))
                except DeathError as error:
                    if rehearse is not None and error.signal in SIGNALS_OF_AN_ANSWER:
                        raise AnswerDeathError(str(error)) from error
                    raise
            finally:
                if worker.is_usable and not self._is_closed:
                    self._idle.append(worker)
                else:
                    await worker.end()

    async def aclose(self) -> None:
        """Stop the idle workers; the others stop when their calls end."""
        self._is_closed = True
        idle, self._idle = self._idle, []
        for worker in idle:
            await worker.end()

    def _key(self, recipe: Recipe) -> int:
        if id(recipe) not in self._keys:
            self._keys[id(recipe)] = len(self._recipes)
            self._recipes.append(recipe)
        return self._keys[id(recipe)]


class _Worker:
    """One process and its two pipes."""

    def __init__(self) -> None:
        self._process: trio.Process | None = None
        self._known: set[int] = set()
        self.is_usable = False  # False while a call is unanswered: the rest of its reply may be in the pipe

    async def prepare(self, key: int, recipe: Recipe) -> None:
        """Start the process if it is not running, and create the reward there if it is not known yet."""
        if self._process is None:
            self._process = await _start()
        if key not in self._known:
            await self.ask(MakeRequest(key, recipe))
            self._known.add(key)

    async def ask(self, request: Request) -> Any:
        assert self._process is not None, "prepare comes first"
        assert self._process.stdin is not None
        self.is_usable = False
        try:
            await self._process.stdin.send_all(frame(request))
            (length,) = HEADER.unpack(await self._read(HEADER.size))
            if length > MAX_BYTES:
                raise RewardError(f"the reward's result is longer than {MAX_BYTES} bytes")
            reply: Reply = pickle.loads(await self._read(length))
        except trio.BrokenResourceError as error:
            raise await self._death() from error
        self.is_usable = True
        if reply.failure is not None:
            raise RewardError(reply.failure.text) from RaisedElsewhere(reply.failure)
        return reply.value

    async def _read(self, count: int) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        data = bytearray()
        while len(data) < count:
            piece = await self._process.stdout.receive_some(min(READ_BYTES, count - len(data)))
            if not piece:
                raise await self._death()
            data += piece
        return bytes(data)

    async def _death(self) -> DeathError:
        assert self._process is not None
        status = None
        with trio.move_on_after(1.0):  # the pipe closes slightly before the exit status is available
            status = await self._process.wait()
        how = "closed its output" if status is None else f"exited with status {status}"
        ended_by = -status if status is not None and status < 0 else None
        return DeathError(
            f"the reward's process {how}" + (f" ({signal.strsignal(ended_by)})" if ended_by else ""), ended_by
        )

    async def end(self) -> None:
        """Kill the process and its children."""
        self.is_usable = False
        if self._process is None:
            return
        with suppress(ProcessLookupError):  # the whole process group: children may outlive the process
            os.killpg(self._process.pid, signal.SIGKILL)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            await trio.aclose_forcefully(stream)
        with trio.move_on_after(KILL_TIMEOUT_S, shield=True):
            await self._process.wait()


async def _start() -> trio.Process:
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    # Not `-m`: the module would be imported twice, as itself and as __main__, with two versions of its
    # message classes.
    command = [sys.executable, "-P", "-c", "from agentrl.rewards.worker import main; main()"]
    environment = {**os.environ, "PYTHONPATH": path}
    process: trio.Process = await trio.lowlevel.open_process(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
    )
    return process
