"""Servants behind the standard input and output of a command: bubblewrap, podman, docker."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from agentrl.errors import SandboxError

TOO_OLD = 62
"""Exit code of a servant whose lifetime has passed, as in inside/servant.py."""
LEAVE_S = 2.0
"""Seconds that a servant has to end by itself once its requests have ended."""
MAX_MESSAGE_CHARS = 300
WAITING = ("/bin/sh", "-c", 'read -r line && exec "$@"', "sh")
"""Starts the command behind it when a line arrives, and lets the command read what follows."""


class CommandPlace:
    """A running command whose standard input and output lead to a servant, and how to end it.

    requests, answers: descriptors to write requests to and read answers from. Whoever makes the place closes
        them.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int] = (),
        before: Callable[[int], None] = lambda pid: None,
        kill: Callable[[int], None],
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the command.

        Args:
            pass_fds: descriptors that it inherits.
            before: called with the process id before the command begins.
            kill: ends the box of this process id, so that the command ends too.
            after: called when everything has ended.

        Raises:
            SandboxError: it cannot be started.
        """
        self._kill, self._after = kill, after
        self._message = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        requests, answers = os.pipe(), os.pipe()
        try:
            self._process = subprocess.Popen(
                [*WAITING, *command],
                stdin=requests[0],
                stdout=answers[1],
                stderr=self._message,
                start_new_session=True,
                pass_fds=pass_fds,
                cwd="/",
            )
        except OSError as error:
            os.close(requests[1])
            os.close(answers[0])
            self._message.close()
            raise SandboxError(f"{command[0]} cannot be started: {error}") from error
        finally:
            os.close(requests[0])
            os.close(answers[1])
        self.requests, self.answers = requests[1], answers[0]
        before(self._process.pid)
        with contextlib.suppress(BrokenPipeError):  # it has ended: `wait` tells why
            os.write(self.requests, b"\n")

    def wait(self, timeout_s: float) -> str | None:
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        if code == TOO_OLD:
            return "it is older than a box may be"
        return self._told()

    def stop(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        if self._has_ended(LEAVE_S):
            self._clean()
            return
        self._kill(self._process.pid)
        if not self._has_ended(max(0.1, deadline - time.monotonic())):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            if not self._has_ended(LEAVE_S):
                raise SandboxError(f"the processes of a box did not end within {timeout_s:g} s")
        self._clean()

    def _has_ended(self, timeout_s: float) -> bool:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _told(self) -> str:
        """Return the last line that the command wrote to stderr."""
        if self._message.closed:
            return ""
        self._message.seek(0)
        lines = self._message.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:MAX_MESSAGE_CHARS] if lines else ""

    def _clean(self) -> None:
        if not self._message.closed:
            self._message.close()
            self._after()


def kill_children(pid: int) -> None:
    """Kill the child processes of a process."""
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split():
            os.kill(int(child), signal.SIGKILL)
