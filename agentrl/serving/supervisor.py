"""Keeps one server process alive: start, readiness, death, restart with a budget, end. Plain threads, no Ray.

A server is ready when it has generated a token. After a restart it has the weights it was first started with, so it stays in
`needs_weights` until somebody has published to it and called `mark_ready`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import trio

from agentrl.errors import ServerError
from agentrl.http.client import HttpClient
from agentrl.serving.launch import Launcher, free_port

ServerState = Literal["starting", "ready", "needs_weights", "failed"]

_POLL_S = 0.1
_PROBE_TIMEOUT_S = 10.0
_STOP_GRACE_S = 8.0
_TAIL_LINES = 20
_TAIL_BYTES = 16 * 1024
_MISUSE_STATUS = 2
_NOT_READY_STATUS = 503
_REFUSAL = re.compile(r"^(?:\S+: )?error: (.+)$", re.MULTILINE)
"""How a program says what is wrong with its options: SGLang, and the embedded server."""


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """One server at one moment; `pid` is None for servers that somebody else started, `message` one line or a log's end."""

    url: str
    state: ServerState
    restarts: int = 0
    pid: int | None = None
    message: str = ""


class Supervisor:
    """One server process and its successors. Thread-safe.

    Args:
        log_file: receives the output of all of them, one after the other.
        start_timeout_s: a server that does not generate by then failed.
        max_restarts: deaths that are answered by a restart; the next one makes the state `failed`.
        api_key: what requests to the server carry.
    """

    def __init__(
        self,
        launcher: Launcher,
        *,
        log_file: Path,
        start_timeout_s: float,
        max_restarts: int,
        host: str = "127.0.0.1",
        api_key: str | None = None,
    ) -> None:
        self._launcher = launcher
        self._log_file = log_file
        self._start_timeout_s = start_timeout_s
        self._max_restarts = max_restarts
        self._host = host
        self._api_key = api_key
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._status = ServerStatus("", "starting")
        self._is_stopping = threading.Event()
        self._model: tuple[str, str] = ("", "")
        self._watcher: threading.Thread | None = None

    def start(self, model_path: str, weight_version: str) -> str:
        """Start the server on a free port, wait until it generates, and return its URL.

        Raises:
            ServerError: it ended, or did not generate in time; the message has the end of its log.
        """
        assert self._watcher is None, "a supervisor starts once"
        self._model = (model_path, weight_version)
        try:
            self._launch()
        except ServerError as error:
            self._end_process()
            self._set(state="failed", message=str(error))
            raise
        self._set(state="ready")
        self._watcher = threading.Thread(target=self._watch, name="server-watch", daemon=True)
        self._watcher.start()
        return self.status().url

    def status(self) -> ServerStatus:
        with self._lock:
            return self._status

    def mark_ready(self) -> None:
        """Say that a restarted server has received the current weights."""
        with self._lock:
            if self._status.state == "needs_weights":
                self._status = _changed(self._status, state="ready")

    def restart(self) -> None:
        """Kill the server, because it does not do what it is told; it is started anew as after a death of its own."""
        with self._lock:
            process = self._process
            self._status = _changed(self._status, state="starting")
        if process is not None:
            _signal_group(process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """End the server: SIGTERM to its process group, SIGKILL after a grace time. Does nothing the second time."""
        self._is_stopping.set()
        self._end_process()
        if self._watcher is not None:
            self._watcher.join()

    # ------------------------------------------------------------------------------------------------------ process

    def _watch(self) -> None:
        while True:
            assert self._process is not None
            code = self._process.wait()
            if self._is_stopping.is_set():
                return
            restarts = self.status().restarts
            why = f"the server ended ({_exit_text(code)})"
            if restarts >= self._max_restarts:
                self._end_process()
                self._set(state="failed", message=f"{why} after {restarts} restarts; the end of its log:\n{self._log_tail()}")
                return
            self._set(state="starting", restarts=restarts + 1, message=why)
            self._end_process()  # what the dead server left in its group
            try:
                self._launch()
            except ServerError as error:
                self._set(message=str(error))
                self._end_process()
                continue
            self._set(state="needs_weights")

    def _launch(self) -> None:
        """Start a process on a fresh port (the old one may linger) and wait until it generates."""
        port = free_port(self._host)
        model_path, weight_version = self._model
        command = self._launcher.command(model_path, weight_version=weight_version, host=self._host, port=port)
        url = f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{port}"
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with self._log_file.open("ab") as log, self._lock:
            if self._is_stopping.is_set():
                raise ServerError("the server is being stopped")
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **self._launcher.environment()},
                    start_new_session=True,
                )
            except OSError as error:
                raise ServerError(f"cannot start {command[0]}: {error}") from error
            self._status = _changed(self._status, url=url, pid=self._process.pid)
        self._wait_until_it_generates(self._process, url)

    def _wait_until_it_generates(self, process: subprocess.Popen[bytes], url: str) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise ServerError(self._why_it_did_not_start(process.returncode))
            if generates(url, api_key=self._api_key, timeout_s=min(_PROBE_TIMEOUT_S, max(0.1, deadline - time.monotonic()))):
                return
            self._is_stopping.wait(_POLL_S)
        raise ServerError(
            f"{url} did not generate within rollout.server_start_timeout_s={self._start_timeout_s:g}; its log ends:\n{self._log_tail()}"
        )

    def _end_process(self) -> None:
        with self._lock:
            process = self._process
        if process is None:
            return
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_STOP_GRACE_S)
        _signal_group(process.pid, signal.SIGKILL)  # also children that outlived it
        process.wait()

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

    def _set(self, *, state: ServerState | None = None, restarts: int | None = None, message: str = "") -> None:
        with self._lock:
            self._status = _changed(self._status, state=state, restarts=restarts, message=message)


def generates(url: str, *, api_key: str | None, timeout_s: float) -> bool:
    """Tell whether the server at `url` generates a token within `timeout_s` and takes requests.

    An SGLang that generates may be warming up still, and would end itself if a pause or an update got in the way.
    """

    async def ask() -> bool:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        with trio.move_on_after(timeout_s):
            async with HttpClient(url, headers=headers) as http:
                try:
                    if (await http.request("POST", "/generate", json=body)).status != 200:
                        return False
                    return (await http.request("GET", "/ready")).status != _NOT_READY_STATUS
                except ServerError:
                    return False
        return False

    return trio.run(ask)


def probe(url: str, *, api_key: str | None, timeout_s: float) -> ServerStatus:
    """Return the status of a server that somebody else runs: `needs_weights` once it generates, `failed` if not by then."""
    deadline = time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0:
        if generates(url, api_key=api_key, timeout_s=min(_PROBE_TIMEOUT_S, left)):
            return ServerStatus(url, "needs_weights")
        time.sleep(_POLL_S)
    return ServerStatus(url, "failed", message=f"{url} did not generate a token within {timeout_s:g} s")


def _changed(
    status: ServerStatus,
    *,
    url: str | None = None,
    state: ServerState | None = None,
    restarts: int | None = None,
    pid: int | None = None,
    message: str | None = None,
) -> ServerStatus:
    return ServerStatus(
        url=status.url if url is None else url,
        state=state or status.state,
        restarts=status.restarts if restarts is None else restarts,
        pid=status.pid if pid is None else pid,
        message=status.message if message is None else message,
    )


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def _exit_text(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
