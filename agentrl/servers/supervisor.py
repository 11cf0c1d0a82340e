"""Keeps one server process alive: start, readiness, death, restart within a budget, shutdown.

Uses plain threads, no Ray.

A server is up once it has generated a token. It then has the weights that it was started with, so its state
is `needs_weights` until somebody publishes to it and calls `mark_ready`. The same holds after a restart. A
hanging server is killed and restarted like one that died.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

from agentrl.errors import ServerError
from agentrl.ports import ReservedPort
from agentrl.servers.health import (
    PROBE_TIMEOUT_S,
    ServerKind,
    ServerStatus,
    ServerWatchdog,
    WatchedServer,
    generates,
)
from agentrl.servers.launch import Launcher

_POLL_S = 0.1
_STOP_GRACE_S = 8.0
_KILL_TIMEOUT_S = 10.0
_JOIN_TIMEOUT_S = 30.0
"""The watching thread may be in a probe, which has its own deadline; only then does it see `_is_stopping`."""
_TAIL_LINES = 20
_TAIL_BYTES = 16 * 1024
_MISUSE_STATUS = 2
_REFUSAL = re.compile(r"^(?:\S+: )?error: (.+)$", re.MULTILINE)
"""How SGLang and the embedded server report a bad option."""


class Supervisor(WatchedServer):
    """One server process and its replacements. Thread-safe: `_lock` guards `_process` and `_status`.

    Args:
        log_file: the output of all these processes is appended to it.
        start_timeout_s: seconds in which a process must generate; otherwise the start failed.
        hang_timeout_s: see ServerWatchdog; a hanging server is killed. None: no watchdog.
        max_restarts: deaths after which the server is restarted; the next one makes the state `failed`.
        kind: reported in the status.
        host: address to listen on.
    """

    def __init__(
        self,
        launcher: Launcher,
        *,
        log_file: Path,
        start_timeout_s: float,
        max_restarts: int,
        hang_timeout_s: float | None = None,
        kind: ServerKind | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        super().__init__(ServerStatus("", "starting", kind))
        self._launcher = launcher
        self._log_file = log_file
        self._start_timeout_s = start_timeout_s
        self._max_restarts = max_restarts
        self._host = host
        self._api_key = launcher.api_key
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog = (
            None
            if hang_timeout_s is None
            else ServerWatchdog(timeout_s=hang_timeout_s, api_key=launcher.api_key)
        )
        self._is_stopping = threading.Event()
        self._model: tuple[str, str] = ("", "")
        self._watcher: threading.Thread | None = None

    def start(self, model_path: str, weight_version: str) -> str:
        """Start the server on a free port, wait until it generates, and return its URL.

        Raises:
            ServerError: it exited or did not generate in time; the message ends with the tail of its log.
        """
        assert self._watcher is None, "a supervisor can only be started once"
        self._model = (model_path, weight_version)
        try:
            self._launch()
        except ServerError as error:
            self._end_process()
            self._set(state="failed", message=str(error))
            raise
        self._set(state="needs_weights", message="")
        self._watcher = threading.Thread(target=self._watch, name="server-watch", daemon=True)
        self._watcher.start()
        return self.status().url

    def restart(self, url: str) -> None:
        """Kill the server at `url` because it did not obey a command; it is restarted as after a crash.

        Does nothing if the server has already been replaced.
        """
        with self._lock:
            if self._status.url != url or self._status.state not in ("ready", "needs_weights"):
                return
            process = self._process
            self._status = replace(self._status, state="starting")
        if process is not None:
            _signal_group(process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Stop the server: SIGTERM to its process group, SIGKILL after a grace period. Idempotent."""
        self._is_stopping.set()
        self._end_process()
        if self._watcher is not None:
            self._watcher.join(_JOIN_TIMEOUT_S)

    # ------------------------------------------------------------------------------------------------ process

    def _watch(self) -> None:
        """Body of the thread: wait for the end of the process, launch another one, and so on.

        The process ends by itself, or is killed by this thread (it hangs), by `restart` or by `stop`. The
        loop ends at `stop`, or when the restarts are used up.
        """
        while True:
            why = self._wait_until_it_ends()
            if self._is_stopping.is_set():
                return
            restarts = self.status().restarts
            if restarts >= self._max_restarts:
                self._end_process()
                self._set(
                    state="failed",
                    message=f"{why} after {restarts} restarts; the end of its log:\n{self._log_tail()}",
                )
                return
            self._set(state="starting", restarts=restarts + 1, message=why)
            self._end_process()  # kills children that the dead server left in its process group
            try:
                self._launch()
            except ServerError as error:
                self._set(message=str(error))
                self._end_process()
                continue
            self._set(state="needs_weights", message="")

    def _wait_until_it_ends(self) -> str:
        """Wait until the process exits, killing it if it hangs; return why it ended."""
        process, dog = self._process, self._watchdog
        assert process is not None
        if dog is None:
            # Without a deadline: `stop` or a crash ends the wait.
            return f"the server ended ({_exit_text(process.wait())})"
        dog.begin(self.status().url)
        while True:
            try:
                return f"the server ended ({_exit_text(process.wait(timeout=dog.interval_s))})"
            except subprocess.TimeoutExpired:
                hung = dog.probe()
            if hung is not None and not self._is_stopping.is_set():
                # Before the kill, because the router must stop sending requests.
                self._set(state="starting", message=hung)
                # Not SIGTERM: a stopped (SIGSTOP) process never handles it.
                _signal_group(process.pid, signal.SIGKILL)
                _wait_for_the_killed(process)
                return hung

    def _launch(self) -> None:
        """Start a process and wait until it generates. The port is fresh: the old one may still be in use."""
        with ReservedPort() as port:
            process, url = self._begin(port.number)
            self._wait_until_it_generates(process, url)

    def _begin(self, port: int) -> tuple[subprocess.Popen[bytes], str]:
        model_path, weight_version = self._model
        command = self._launcher.command(
            model_path, weight_version=weight_version, host=self._host, port=port
        )
        url = f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{port}"
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with self._log_file.open("ab") as log, self._lock:
            if self._is_stopping.is_set():
                # Checked under the lock: `stop` either sees the new process here or prevents it.
                raise ServerError("the server is being stopped")
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL if self._api_key is None else subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **self._launcher.environment()},
                    start_new_session=True,
                )
            except OSError as error:
                raise ServerError(f"cannot start {command[0]}: {error}") from error
            self._status = replace(self._status, url=url, pid=self._process.pid)
            process = self._process
        _hand_over(self._api_key, process)
        return process, url

    def _wait_until_it_generates(self, process: subprocess.Popen[bytes], url: str) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise ServerError(self._why_it_did_not_start(process.returncode))
            if generates(
                url,
                api_key=self._api_key,
                timeout_s=min(PROBE_TIMEOUT_S, max(0.1, deadline - time.monotonic())),
            ):
                return
            self._is_stopping.wait(_POLL_S)
        raise ServerError(
            f"{url} did not generate within rollout.server_start_timeout_s={self._start_timeout_s:g}; its "
            f"log ends:\n{self._log_tail()}"
        )

    def _end_process(self) -> None:
        with self._lock:
            process = self._process
        if process is None:
            return
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_STOP_GRACE_S)
        _signal_group(process.pid, signal.SIGKILL)  # also for children that outlived the leader of the group
        _wait_for_the_killed(process)

    def _why_it_did_not_start(self, code: int) -> str:
        tail = self._log_tail()
        refusals = _REFUSAL.findall(tail)
        if code == _MISUSE_STATUS and refusals:
            return f"the server refused to start: {refusals[-1]}"
        return f"the server ended while starting ({_exit_text(code)}); its log ends:\n{tail}"

    def _log_tail(self) -> str:
        with self._log_file.open("rb") as log:
            log.seek(max(0, self._log_file.stat().st_size - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


def _hand_over(key: str | None, process: subprocess.Popen[bytes]) -> None:
    """Pass the API key by standard input: command lines and environments are visible to other processes."""
    if key is not None and process.stdin is not None:
        # If the process has exited, the waiting caller reports why.
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(f"{key}\n".encode())


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def _wait_for_the_killed(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that got SIGKILL. One stuck in the kernel is abandoned after a timeout."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_KILL_TIMEOUT_S)


def _exit_text(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
