"""A launcher process as the host sees it: start, request, timeout, stop."""

from __future__ import annotations

import contextlib
import marshal
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.errors import SandboxError

START_S = 30.0
"""Seconds a launcher may take beyond its program's time: for walls and files, on a busy machine."""
KILL_TIMEOUT_S = 10.0
STOPPED = "gone"
"""As in launcher/watch.py: the host gave up."""
MAX_REPLY_BYTES = 512 * 2**20
HEADER_BYTES = 8  # as in launcher/request.py, which runs without this package

_START = "import sys; sys.path.append(sys.argv[1]); from launcher.main import main; main()"


class StoppedError(SandboxError):
    """The host stopped an execution before it had a result."""


class LauncherProcess:
    """Runs one request. `stop` may be called from any thread: the launcher then kills the program and exits.

    channel: descriptors to read from and to write to, which become 3 and 4 in the program. `run` closes them
        here.
    """

    def __init__(
        self, request: Mapping[str, Any], *, timeout_s: float, channel: tuple[int, int] | None = None
    ) -> None:
        self._channel = channel or ()
        self._payload = marshal.dumps({**request, "channel": list(self._channel)})
        self._timeout_s = timeout_s + START_S
        self._lock = threading.Lock()
        self._stopped = False
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> dict[str, Any]:
        """Start the launcher and return its reply. If it was stopped meanwhile, the reply's `why` is STOPPED.

        Raises:
            SandboxError: it could not be started, broke or hung. StoppedError: it was stopped before it
                replied.
        """
        try:
            process = self._start()
        finally:
            for descriptor in self._channel:
                os.close(descriptor)
        try:
            output, errors = self._talk(process)
        finally:
            self._end(process)
        if process.returncode != 0 or not output:
            if self._stopped:
                raise StoppedError("the sandbox was stopped")
            tail = errors.decode("utf-8", "replace").strip().splitlines()[-1:]
            raise SandboxError(
                f"the sandbox's launcher ended with {process.returncode}: "
                f"{''.join(tail)[:300] or 'no message'}"
            )
        reply = marshal.loads(output)
        assert isinstance(reply, dict)
        return reply

    def stop(self) -> None:
        """Make `run` return soon: closes the launcher's input, which it watches."""
        with self._lock:
            self._stopped = True
            if self._process is not None and self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()

    def _start(self) -> subprocess.Popen[bytes]:
        folder = str(Path(__file__).parent)
        with self._lock:
            if self._stopped:
                raise StoppedError("the sandbox was stopped")
            try:
                self._process = subprocess.Popen(
                    [interpreter(), "-I", "-S", "-X", "utf8", "-c", _START, folder],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    # Only what an interpreter needs to find its libraries; no secrets of the host's
                    # environment.
                    env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
                    cwd="/",
                    bufsize=0,
                    start_new_session=True,
                    pass_fds=self._channel,
                )
            except OSError as error:
                raise SandboxError(f"the sandbox's launcher cannot be started: {error}") from error
            return self._process

    def _talk(self, process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
        """Send the request and read both outputs to their end.

        The input stays open: closing it means stop.
        """
        assert process.stdout is not None
        assert process.stderr is not None
        deadline = time.monotonic() + self._timeout_s
        self._send(process)
        outputs: dict[int, bytearray] = {
            process.stdout.fileno(): bytearray(),
            process.stderr.fileno(): bytearray(),
        }
        with selectors.DefaultSelector() as selector:
            for descriptor in outputs:
                selector.register(descriptor, selectors.EVENT_READ)
            while selector.get_map():
                if (remaining := deadline - time.monotonic()) <= 0:
                    raise SandboxError(f"the sandbox's launcher hung for {self._timeout_s:g} s")
                for key, _ in selector.select(remaining):
                    if piece := os.read(key.fd, 1 << 20):
                        outputs[key.fd] += piece
                    else:
                        selector.unregister(key.fd)
                    if len(outputs[key.fd]) > MAX_REPLY_BYTES:
                        raise SandboxError("the sandbox's launcher sent a reply that is too long")
        process.wait(max(0.1, deadline - time.monotonic()))
        output, errors = outputs.values()
        return bytes(output), bytes(errors)

    def _send(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        view = memoryview(len(self._payload).to_bytes(HEADER_BYTES, "big") + self._payload)
        with self._lock, contextlib.suppress(OSError, ValueError):  # it exited, or `stop` closed the pipe
            while view:
                view = view[process.stdin.write(view) :]

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a launcher that still runs; its program is killed with it."""
        if process.poll() is None:
            process.kill()
            # A process that is stuck in the kernel, say in a driver, is abandoned.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_TIMEOUT_S)
        with self._lock:
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()


class LauncherPair:
    """Two launchers whose programs talk to each other. Both are over when the second one ends."""

    def __init__(self, first: LauncherProcess, second: LauncherProcess) -> None:
        self._first = first
        self._second = second

    def run(self) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Return both replies; the first is None if it had to be stopped. Raises SandboxError."""
        ended: list[dict[str, Any] | SandboxError] = []

        def run_first() -> None:
            try:
                ended.append(self._first.run())
            except SandboxError as error:
                ended.append(error)

        thread = threading.Thread(target=run_first, name="sandbox-pair")
        thread.start()
        try:
            reply = self._second.run()
        finally:
            self._first.stop()
            thread.join()
        (outcome,) = ended
        if isinstance(outcome, StoppedError):
            return None, reply
        if isinstance(outcome, SandboxError):
            raise outcome
        return (None if outcome["why"] == STOPPED else outcome), reply

    def stop(self) -> None:
        """Make `run` raise SandboxError soon."""
        self._second.stop()


def interpreter() -> str:
    """Return the base interpreter, not a virtual environment's, which would read that environment's
    settings.
    """
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))
