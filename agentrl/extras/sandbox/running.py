"""A program that runs beside its caller, for as long as the caller wants."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.errors import SandboxError
from agentrl.extras.sandbox.process import LauncherProcess, StoppedError
from agentrl.extras.sandbox.result import SandboxResult


class RunningProgram:
    """One program and the thread that waits for its launcher. Whoever starts it calls `stop`.

    If the caller's process dies, the launcher notices, kills the program with all its processes, and exits.
    """

    def __init__(
        self, process: LauncherProcess, to_result: Callable[[Mapping[str, Any]], SandboxResult]
    ) -> None:
        self._process = process
        self._to_result = to_result
        self._ended: SandboxResult | SandboxError | None = None
        # A daemon: a launcher that is stuck in the kernel must not keep the interpreter from exiting.
        self._thread = threading.Thread(target=self._run, name="sandbox-program", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> SandboxResult | None:
        """Wait for the end and return the result; None if the program still runs, or was stopped.

        Raises:
            SandboxError: the sandbox broke, which says nothing about the program.
        """
        self._thread.join(timeout_s)
        if isinstance(self._ended, SandboxError):
            raise self._ended
        return self._ended

    def stop(self, timeout_s: float) -> None:
        """Kill the program with all of its processes, and wait until they have ended.

        Raises:
            SandboxError: it has not ended after `timeout_s`.
        """
        self._process.stop()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise SandboxError(f"a program in the sandbox did not end within {timeout_s:g} s")

    def _run(self) -> None:
        try:
            self._ended = self._to_result(self._process.run())
        except StoppedError:
            self._ended = None
        except SandboxError as error:
            self._ended = error
