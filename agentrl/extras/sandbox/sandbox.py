"""Runs programs that a model wrote, each in its own process, behind walls that a self-test has verified."""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import trio

from agentrl.errors import SandboxError
from agentrl.extras.sandbox.limits import MIB, Limits, SandboxOptions
from agentrl.extras.sandbox.process import LauncherPair, LauncherProcess, interpreter
from agentrl.extras.sandbox.protections import PROBE, Protections, bait, judge, refuse
from agentrl.extras.sandbox.result import Ending, SandboxResult
from agentrl.extras.sandbox.running import RunningProgram
from agentrl.granted import granted_cpus

Reply = TypeVar("Reply", covariant=True)
log = logging.getLogger(__name__)

TEST_S = 30.0
"""Minimum time limit of the self-test, in seconds. It needs milliseconds, unless the machine is busy."""

_reports: dict[str, None] = {}
"""Results of this process's self-tests, each once. A dict serves as an ordered set."""


@dataclass(frozen=True, slots=True)
class Program:
    """Python source to run as `__main__`, in a working folder with `files` (relative path -> content).

    echo: print the value of a last expression, as the interactive prompt does.
    is_merged: stderr goes to stdout, in the order of writing.
    workspace: a file of the host, empty at first, that preserves the working folder from one program to the
        next.
    commands: the system's commands (bash, git, ...) can be run too, not only the interpreter.
    limits: override the sandbox's limits.
    """

    source: str
    stdin: str | bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    echo: bool = False
    is_merged: bool = False
    workspace: Path | None = None
    commands: bool = False
    limits: Limits | None = None


class Sandbox:
    """Runs programs within `options.limits`. `open_sandbox` returns a shared one.

    At most `num_slots` programs run at a time: `options.max_concurrent`, or the number of CPUs.
    avoid: mechanisms that are not used (namespaces, landlock, seccomp, cgroup), to test the remaining ones.
    """

    def __init__(self, options: SandboxOptions | None = None, *, avoid: tuple[str, ...] = ()) -> None:
        self.options = options or SandboxOptions()
        self._avoid = avoid
        self.num_slots = self.options.max_concurrent or granted_cpus()
        self._slots = threading.BoundedSemaphore(self.num_slots)
        self._limiter = trio.CapacityLimiter(self.num_slots)
        self._check_lock = threading.Lock()
        self._protections: Protections | None = None

    async def run(self, program: Program) -> SandboxResult:
        """Run a program to its end and return its result. If cancelled, it is killed before this returns.

        Raises:
            SandboxError: the sandbox broke, which says nothing about the program.
            ConfigError: a wall is missing on this machine and not in `allow_unprotected`.
        """
        return _result(await self._play(self._process(program)))

    async def run_pair(self, program: Program, judge: Program) -> tuple[SandboxResult | None, SandboxResult]:
        """Run two programs in separate walls, connected by two pipes.

        Each program reads from descriptor 3 and writes to descriptor 4. When `judge` ends, `program` is
        killed: only the judge decides the outcome.

        Returns:
            Results of both; the first is None if `program` was killed.

        Raises:
            SandboxError, ConfigError: as in `run`.
        """
        # Close-on-exec: each launcher inherits only the ends passed to it.
        asked, answered = (
            os.pipe(),
            os.pipe(),
        )
        first = self._process(program, channel=(asked[0], answered[1]))
        second = self._process(judge, channel=(answered[0], asked[1]))
        ended, judged = await self._play(LauncherPair(first, second))
        return None if ended is None else _result(ended), _result(judged)

    async def _play(self, process: Stoppable[Reply]) -> Reply:
        if self._protections is None:
            await trio.to_thread.run_sync(self.check)
        failure: SandboxError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_stop_when_cancelled, process)
            try:
                reply = await trio.to_thread.run_sync(process.run, limiter=self._limiter)
            except (
                SandboxError
            ) as error:  # kept, so that no exception group wraps it; a cancellation drops it
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return reply

    def run_sync(self, program: Program) -> SandboxResult:
        """Do what `run` does, blocking. For any thread."""
        self.check()
        process = self._process(program)
        with self._slots:
            return _result(process.run())

    def start(self, program: Program, *, channel: tuple[int, int]) -> RunningProgram:
        """Start a program that runs beside its caller, without a slot, until it ends or is stopped.

        channel: descriptors to read from and to write to, which become 3 and 4 in the program; closed here.

        Raises:
            SandboxError, ConfigError: as in `check`, which runs before.
        """
        try:
            self.check()
        except BaseException:
            for descriptor in channel:
                os.close(descriptor)
            raise
        return RunningProgram(self._process(program, channel=channel), _result)

    def check(self) -> Protections:
        """Run the self-test once, log its result, and return the active walls.

        Raises:
            SandboxError: the sandbox does not run at all.
            ConfigError: a wall is missing on this machine and not in `allow_unprotected`.
        """
        with self._check_lock:
            if self._protections is None:
                protections = self._test()
                refuse(protections, self.options.allow_unprotected)
                log.info("%s", protections)
                _reports[str(protections)] = None
                self._protections = protections
            return self._protections

    def _test(self) -> Protections:
        # The time limits are for programs: a slow self-test on a busy machine does not mean that walls are
        # missing.
        own = self.options.limits
        limits = replace(own, wall_s=max(own.wall_s, TEST_S), cpu_s=max(own.cpu_s, TEST_S))
        with bait(limits) as baited:
            reply = self._process(Program(PROBE, stdin=json.dumps(baited), limits=limits)).run()
            return judge(_result(reply), reply, baited, limits)

    def _process(self, program: Program, *, channel: tuple[int, int] | None = None) -> LauncherProcess:
        limits = program.limits or self.options.limits
        return LauncherProcess(self._request(program, limits), timeout_s=limits.wall_s, channel=channel)

    def _request(self, program: Program, limits: Limits) -> dict[str, Any]:
        python = interpreter()
        stdin = (
            program.stdin.encode("utf-8", "surrogatepass")
            if isinstance(program.stdin, str)
            else program.stdin
        )
        for path in program.files:
            if path.startswith("/") or not {"", ".", ".."}.isdisjoint(path.split("/")):
                raise ValueError(
                    f"a program's file {path!r} must be a relative path below its working folder"
                )
        return {
            "python": python,
            "prefix": os.path.realpath(sys.base_prefix),
            "packages": _packages() if self.options.packages else [],
            "source": program.source.encode("utf-8", "replace").decode(),
            "echo": program.echo,
            "stdin": stdin,
            "files": dict(program.files),
            "workspace": None if program.workspace is None else str(program.workspace),
            "temporary": tempfile.gettempdir(),
            "is_merged": program.is_merged,
            "commands": program.commands,
            "avoid": list(self._avoid),
            "cpu_s": float(limits.cpu_s),
            "wall_s": float(limits.wall_s),
            "memory_bytes": limits.memory_mib * MIB,
            "max_processes": limits.max_processes,
            "output_bytes": limits.output_kib * 1024,
            "file_bytes": limits.file_mib * MIB,
            "disk_bytes": limits.disk_mib * MIB,
            "max_files": limits.max_files,
            "max_open_files": limits.max_open_files,
        }


def sandbox_reports() -> tuple[str, ...]:
    """Return the distinct self-test results of this process's sandboxes, one line each."""
    return tuple(_reports)


@functools.lru_cache(maxsize=64)
def open_sandbox(options: SandboxOptions) -> Sandbox:
    """Return this process's one sandbox with these options. Its self-test runs once, its slots are shared."""
    return Sandbox(options)


class Stoppable(Protocol[Reply]):
    """A blocking call that `stop` ends from another thread."""

    def run(self) -> Reply: ...
    def stop(self) -> None: ...


async def _stop_when_cancelled(process: Stoppable[Any]) -> None:
    # A thread cannot be cancelled, but `process.run` returns in its thread once the process is stopped.
    try:
        await trio.sleep_forever()
    finally:
        process.stop()


@functools.cache
def _packages() -> list[str]:
    """Return the folders of installed packages: those of a virtual environment, else the interpreter's
    own.
    """
    paths = dict.fromkeys(os.path.realpath(sysconfig.get_path(kind)) for kind in ("purelib", "platlib"))
    return [path for path in paths if os.path.isdir(path)]


def _result(reply: Mapping[str, Any]) -> SandboxResult:
    if reply["error"]:
        raise SandboxError(f"the sandbox failed at {reply['error']}")
    status, why = reply["status"], reply["why"]
    ended_by: Ending = why or "exited"
    code = os.waitstatus_to_exitcode(status) if ended_by == "exited" else None
    if code == -signal.SIGXCPU:
        ended_by, code = "cpu", None
    return SandboxResult(
        stdout=_text(reply["stdout"]),
        stderr=_text(reply["stderr"]),
        exit_code=code if code is not None and code >= 0 else None,
        signal=-code if code is not None and code < 0 else None,
        ended_by=ended_by,
        is_output_truncated=reply["is_truncated"],
        wall_s=reply["wall_s"],
        cpu_s=reply["cpu_s"],
        is_workspace_cut=reply["is_workspace_cut"],
    )


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
