"""Watches a server that was started outside this run: up, hanging, up again. Uses plain threads, no Ray.

This process cannot restart such a server. If it hangs or rejects its weights, it gets no traffic until it
generates again. Then it receives the current weights, like a server that was restarted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import trio

from agentrl.errors import ConfigError, ServerError
from agentrl.servers.client import SGLangClient
from agentrl.servers.health import (
    PROBE_TIMEOUT_S,
    ServerStatus,
    ServerWatchdog,
    Silence,
    WatchedServer,
    find_silence,
    kind_of,
)
from agentrl.servers.startup import Readiness

_POLL_S = 0.1
_FIRST_PROBE_S = 5.0
_RELEASE_TIMEOUT_S = 5.0
_JOIN_TIMEOUT_S = 2 * PROBE_TIMEOUT_S
"""Each probe that the thread sends has a shorter deadline."""


def check_attached(
    urls: Sequence[str], *, api_key: str | None, start_timeout_s: float, say: Callable[[str], None]
) -> None:
    """Ask each server for a token, all at once; `say` which ones will be waited for, why and how long.

    Raises:
        ConfigError: what listens at a URL is no server of the protocol, or refuses the key.
    """
    silences = trio.run(_silences, urls, api_key)
    for url, silence in silences.items():
        if silence.is_final:
            raise ConfigError(f"rollout.urls: {url}: {silence.why}")
    for url, silence in silences.items():
        say(f"rollout.urls: {url}: {silence.why}; waiting for it, at most {start_timeout_s:g} s")


async def _silences(urls: Sequence[str], api_key: str | None) -> dict[str, Silence]:
    found: dict[str, Silence] = {}

    async def ask(url: str) -> None:
        silence = await find_silence(url, api_key, _FIRST_PROBE_S)
        if silence is not None:
            found[url] = silence

    async with trio.open_nursery() as nursery:
        for url in urls:
            nursery.start_soon(ask, url)
    return {url: found[url] for url in urls if url in found}


class AttachedServer(WatchedServer):
    """The server at `url`, which the fleet handles like one that the run started. Thread-safe.

    Whoever calls and the thread that watches share `_status` under `_lock`. The thread alone decides when the
    server is up again; `restart` and `stop` only wake it.

    Args:
        start_timeout_s: seconds in which the server must generate, at the start and after each failure.
            If it does not, its state is `failed`.
        hang_timeout_s: see ServerWatchdog.
        max_restarts: failures to recover from; the next one makes the state `failed`.
        api_key: sent with every request to the server.
    """

    origin: Literal["attached"] = "attached"
    starting: Mapping[Any, float] = MappingProxyType({})
    """Nothing that Ray could wait for: `readiness` alone shows the progress."""

    def __init__(
        self,
        url: str,
        *,
        start_timeout_s: float,
        hang_timeout_s: float,
        max_restarts: int,
        api_key: str | None,
    ) -> None:
        self.name = url.rstrip("/")
        super().__init__(ServerStatus(self.name, "starting"))
        self.api_key = api_key
        self._start_timeout_s = start_timeout_s
        self._max_restarts = max_restarts
        self._watchdog = ServerWatchdog(timeout_s=hang_timeout_s, api_key=api_key)
        self._is_stopping = threading.Event()
        self._failure = threading.Event()  # set by `restart` and `stop`: wakes the thread between two probes
        self._thread = threading.Thread(target=self._watch, name="attached-watch", daemon=True)

    def start(self) -> None:
        """Start the thread that waits for the server and then watches it."""
        self._thread.start()

    @property
    def readiness(self) -> Readiness:
        status = self.status()
        is_starting = status.state == "starting"
        waits_for = f"rollout.urls: {self.name}: {status.message}" if is_starting and status.message else ""
        is_ready = not is_starting and status.state != "failed"
        return Readiness("servers", int(is_ready), 1, may_come=is_starting, waits_for=waits_for)

    def wait_until_ready(self) -> None:
        """Wait until the server generates; raise ServerError if it does not in time."""
        while (status := self.status()).state == "starting":
            time.sleep(_POLL_S)  # the thread sets `failed` after start_timeout_s
        if status.state == "failed":
            raise ServerError(status.message)

    def restart(self, url: str) -> None:
        """Treat the server at `url`, which did not obey a command, as failed until it generates again."""
        with self._lock:
            if self._status.url != url or self._status.state not in ("ready", "needs_weights"):
                return
            self._status = replace(self._status, state="starting", message="it did not carry out a request")
        self._failure.set()

    def begin_status(self) -> None:
        """Do nothing: `status` does not wait."""

    def begin_stop(self) -> None:
        self._is_stopping.set()
        self._failure.set()

    def stop(self) -> None:
        """Stop watching. The server keeps running."""
        self.begin_stop()
        if self._thread.is_alive():
            self._thread.join(_JOIN_TIMEOUT_S)

    # -------------------------------------------------------------------------------------------------- watch

    def _watch(self) -> None:
        """Body of the thread: wait until the server generates, probe it until it fails, and so on.

        A failure is what a probe finds, or what `restart` reports by `_failure`. Ends at `stop`, when the
        server does not come up in time, or when the failures exceed the budget.
        """
        while self._wait_until_it_generates():
            self._watchdog.begin(self.status().url)
            why = None
            while why is None and not self._failure.wait(self._watchdog.interval_s):
                why = self._watchdog.probe()
            if self._is_stopping.is_set():
                return
            restarts = self.status().restarts
            if restarts >= self._max_restarts:
                self._set(
                    state="failed",
                    message=f"{why or self.status().message}, after {restarts} earlier failures",
                )
                return
            self._set(state="starting", restarts=restarts + 1, **({} if why is None else {"message": why}))
            self._failure.clear()
            trio.run(self._release)

    def _wait_until_it_generates(self) -> bool:
        status, deadline = self.status(), time.monotonic() + self._start_timeout_s
        url, is_first = status.url, status.restarts == 0
        why = status.message
        while (left := deadline - time.monotonic()) > 0:
            silence = trio.run(find_silence, url, self.api_key, min(PROBE_TIMEOUT_S, left))
            if silence is None:
                self._set(
                    state="needs_weights",
                    kind=kind_of(url, api_key=self.api_key, timeout_s=PROBE_TIMEOUT_S),
                    message="",
                )
                return True
            why = silence.why
            if silence.is_final and is_first:  # later, a proxy may answer for a server that is restarting
                self._set(state="failed", message=f"rollout.urls: {url}: {why}")
                return False
            self._set(message=why)
            if self._is_stopping.wait(_POLL_S):
                return False
        self._set(
            state="failed",
            message=f"rollout.urls: {url} did not generate a token within "
            f"rollout.server_start_timeout_s={self._start_timeout_s:g}: {why}",
        )
        return False

    async def _release(self) -> None:
        """Resume a server that a failed publish left paused, if it listens.

        Its weights may be mixed. That does no harm: the router sends it nothing before `mark_ready`.
        """
        client = SGLangClient(self.status().url, api_key=self.api_key)
        with trio.move_on_after(_RELEASE_TIMEOUT_S):
            for verb in (client.end_weight_update, client.resume):
                with suppress(ServerError):
                    await verb()
        await client.aclose()
