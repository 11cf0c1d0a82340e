"""Server health as seen from outside, by requests that every server of the protocol answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import trio

from agentrl.errors import ServerError
from agentrl.http.client import HttpClient, HttpReply
from agentrl.servers.client import SGLangClient
from agentrl.servers.protocol import ServerLoad

T = TypeVar("T")

ServerKind = str
"""A name of `agentrl.servers`, as in `rollout.backend`."""
ServerState = Literal["starting", "ready", "needs_weights", "failed"]

PROBE_TIMEOUT_S = 10.0
EMBEDDED_BACKEND = "agentrl-embedded"
"""The `backend` that the embedded server reports in /server_info."""

_PROBES_PER_TIMEOUT = 4
_LONGEST_INTERVAL_S = 5.0
_NOT_READY_STATUS = 503
_NO_ACCESS = frozenset({401, 403})
_NO_ROUTE = frozenset({404, 405, 501})
_ONE_TOKEN = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """State of one server at one moment.

    `pid` is None for servers that were not started here. `kind` is None until it is known. `message` is one
    line, or the tail of a log.
    """

    url: str
    state: ServerState
    kind: ServerKind | None = None
    restarts: int = 0
    pid: int | None = None
    message: str = ""


class WatchedServer:
    """A server that a thread watches: its status, shared with all callers under `_lock`."""

    def __init__(self, status: ServerStatus) -> None:
        self._lock = threading.Lock()
        self._status = status

    def status(self) -> ServerStatus:
        with self._lock:
            return self._status

    def mark_ready(self, url: str) -> None:
        """Record that the server at `url` has the current weights. Ignored if the state has changed since."""
        with self._lock:
            if self._status.url == url and self._status.state == "needs_weights":
                self._status = replace(self._status, state="ready")

    def _set(self, **changes: Any) -> None:
        with self._lock:
            self._status = replace(self._status, **changes)


def generates(url: str, *, api_key: str | None, timeout_s: float) -> bool:
    """Return whether the server at `url` generates a token within `timeout_s` and is ready for requests."""
    return trio.run(find_silence, url, api_key, timeout_s) is None


@dataclass(frozen=True, slots=True)
class Silence:
    """Why no token came from a URL, in one line. is_final: waiting does not help, another server answers."""

    why: str
    is_final: bool = False


async def find_silence(url: str, api_key: str | None, timeout_s: float) -> Silence | None:
    """Return why the server at `url` does not generate a token within `timeout_s`; None if it does, and is
    ready for requests.

    /ready matters too: SGLang may generate while it still warms up, and a pause or a weight update during the
    warm-up makes it exit.
    """
    try:
        with trio.move_on_after(timeout_s):
            async with _open(url, api_key) as http:
                silence = _silence_of(await http.request("POST", "/generate", json=_ONE_TOKEN))
                if silence is None and (await http.request("GET", "/ready")).status == _NOT_READY_STATUS:
                    silence = Silence("it is not ready for requests")
            return silence
    except ServerError as error:
        return Silence(str(error))
    return Silence(f"no answer within {timeout_s:g} s")


def _silence_of(reply: HttpReply) -> Silence | None:
    if reply.status == 200 and _is_generation(reply):
        return None
    answered = f"POST /generate was answered by {reply.status}, {reply.excerpt()}"
    if reply.status in _NO_ACCESS:
        return Silence(f"it refuses the API key, or the lack of one: {answered}", is_final=True)
    if reply.status == 200 or 300 <= reply.status < 400 or reply.status in _NO_ROUTE:
        return Silence(f"it is no server of SGLang's protocol: {answered}", is_final=True)
    return Silence(answered)


def kind_of(url: str, *, api_key: str | None, timeout_s: float) -> ServerKind | None:
    """Return the kind of server at `url`, None if it does not answer within `timeout_s`."""

    async def ask() -> ServerKind:
        client = SGLangClient(url, api_key=api_key)
        try:
            return "embedded" if (await client.server_info()).get("backend") == EMBEDDED_BACKEND else "sglang"
        finally:
            await client.aclose()

    return trio.run(_answer_of, ask, timeout_s)


class ServerWatchdog:
    """Detects a hanging server: for `timeout_s` it neither makes progress nor answers a small request.

    A paused server is healthy although it does nothing. /v1/loads alone is not enough: SGLang answers it from
    a snapshot that its scheduler writes. When the scheduler hangs, the snapshot no longer changes, but it is
    still served.
    """

    def __init__(
        self, *, timeout_s: float, api_key: str | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._timeout_s = timeout_s
        self._api_key = api_key
        self._clock = clock
        self._url = ""
        self._load: ServerLoad | None = None
        self._well_at = clock()

    @property
    def interval_s(self) -> float:
        """Seconds between two probes; also the longest duration of one."""
        return min(_LONGEST_INTERVAL_S, self._timeout_s / _PROBES_PER_TIMEOUT)

    def begin(self, url: str) -> None:
        """Start watching the server at `url`, which was healthy a moment ago."""
        self._url, self._load, self._well_at = url, None, self._clock()

    def probe(self) -> str | None:
        """Probe once; return why the server counts as hanging, or None if it does not."""
        is_well = trio.run(_answer_of, self._is_well, self.interval_s)
        now = self._clock()
        if is_well:
            self._well_at = now
        if now - self._well_at < self._timeout_s:
            return None
        return f"the server hung: it sent nothing for rollout.server_hang_timeout_s={self._timeout_s:g}"

    async def _is_well(self) -> bool:
        client = SGLangClient(self._url, api_key=self._api_key)
        try:
            before, self._load = self._load, await client.loads()
            if self._load.num_running + self._load.num_waiting == 0:
                return await self._answers(client)
            return self._load != before or await client.is_paused()
        finally:
            await client.aclose()

    async def _answers(self, client: SGLangClient) -> bool:
        """Return whether an idle server generates a token or is paused."""
        if await client.is_paused():
            return True
        with trio.move_on_after(self.interval_s / 2):
            async with _open(self._url, self._api_key) as http:
                return _silence_of(await http.request("POST", "/generate", json=_ONE_TOKEN)) is None
        return await client.is_paused()  # it may have been paused since the first question


def _open(url: str, api_key: str | None) -> HttpClient:
    return HttpClient(url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})


def _is_generation(reply: HttpReply) -> bool:
    """Return whether a reply is a generation, of any weight version, or an aborted one."""
    with suppress(ServerError):
        answer = reply.json()
        return isinstance(answer, Mapping) and isinstance(answer.get("output_ids"), list)
    return False


async def _answer_of(question: Callable[[], Awaitable[T]], timeout_s: float) -> T | None:
    """Return the answer of `question`, None if the server fails or takes longer than `timeout_s`."""
    with trio.move_on_after(timeout_s), suppress(ServerError):
        return await question()
    return None
