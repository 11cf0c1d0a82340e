"""Draws the report of a run anew while it runs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

END_TIMEOUT_S = 10.0


class ReportRefresher:
    """Refreshes a run's report periodically in a child process, because drawing takes seconds."""

    def __init__(self, folder: Path, *, interval_s: float, say: Callable[[str], None]) -> None:
        """`interval_s`: seconds between refreshes; 0: never."""
        guard = ["-m", "agentrl.guard", "--whole-tree", "--parent-pid", str(os.getpid()), "--"]
        self._command = [sys.executable, *guard, sys.executable, "-m", "agentrl.cli", "report", str(folder)]
        self._interval_s = interval_s
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._begun = time.monotonic()

    def consider(self) -> None:
        """Start a refresh if one is due and none is running.

        Never raises: a failed report must not end the run.
        """
        if not self._interval_s or time.monotonic() - self._begun < self._interval_s or not self._is_free():
            return
        self._begun = time.monotonic()
        self._errors.seek(0)
        self._errors.truncate()
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._errors
            )
        except OSError as error:
            self._say(f"the report cannot be refreshed: {error}")

    def close(self) -> None:
        """Kill a running refresh. The run writes its report at the end anyway."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()  # the guard ends the refresh
            self._process.wait(END_TIMEOUT_S)
        self._errors.close()

    def _is_free(self) -> bool:
        if self._process is None:
            return True
        status = self._process.poll()
        if status:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            self._say(f"the report was not refreshed: {lines[-1] if lines else f'exit code {status}'}")
        if status is not None:
            self._process = None
        return status is not None
