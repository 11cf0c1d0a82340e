"""How a server is, found out from outside by questions that every server of the protocol answers."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

import trio

from agentrl.errors import ServerError
from agentrl.http.client import HttpClient
from agentrl.sglang.client import SGLangClient
from agentrl.sglang.protocol import ServerLoad

T = TypeVar("T")

ServerKind = Literal["embedded", "sglang"]
ServerState = Literal["starting", "ready", "needs_weights", "failed"]

PROBE_TIMEOUT_S = 10.0
EMBEDDED_BACKEND = "agentrl-embedded"
"""What /server_info of the embedded server calls its backend."""

_LOOKS_PER_TIMEOUT = 4
_LONGEST_INTERVAL_S = 5.0
_NOT_READY_STATUS = 503


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """One server at one moment. `pid` is None for servers that somebody else started, `kind` until it is known; `message` is one line,
    or the end of a log."""

    url: str
    state: ServerState
    kind: ServerKind | None = None
    restarts: int = 0
    pid: int | None = None
    message: str = ""


def generates(url: str, *, api_key: str | None, timeout_s: float) -> bool:
    """Tell whether the server at `url` generates a token within `timeout_s` and takes requests.

    An SGLang that generates may be warming up still, and would end itself if a pause or an update got in the way.
    """

    async def ask() -> bool:
        async with _open(url, api_key) as http:
            return await _samples_one(http) and (await http.request("GET", "/ready")).status != _NOT_READY_STATUS

    return trio.run(_answer_of, ask, timeout_s) or False


def kind_of(url: str, *, api_key: str | None, timeout_s: float) -> ServerKind | None:
    """Return which kind of server runs at `url`, None when it does not say so within `timeout_s`."""

    async def ask() -> ServerKind:
        client = SGLangClient(url, api_key=api_key)
        try:
            return "embedded" if (await client.server_info()).get("backend") == EMBEDDED_BACKEND else "sglang"
        finally:
            await client.aclose()

    return trio.run(_answer_of, ask, timeout_s)


class ServerWatchdog:
    """Notices a server that hangs: its process lives, and for `timeout_s` it neither samples what it has nor answers a small request.

    A paused server does nothing and is well. Its load alone would not do: SGLang answers that from a snapshot of its scheduler's, which
    stays as it is when the scheduler hangs.
    """

    def __init__(self, *, timeout_s: float, api_key: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._api_key = api_key
        self._clock = clock
        self._url = ""
        self._load: ServerLoad | None = None
        self._well_at = clock()

    @property
    def interval_s(self) -> float:
        """How long to wait between two looks; one takes no longer."""
        return min(_LONGEST_INTERVAL_S, self._timeout_s / _LOOKS_PER_TIMEOUT)

    def begin(self, url: str) -> None:
        """Watch the server at `url`, which was well a moment ago."""
        self._url, self._load, self._well_at = url, None, self._clock()

    def look(self) -> str | None:
        """Look once; return why the server counts as hanging, None while it does not."""
        is_well = trio.run(_answer_of, self._is_well, self.interval_s)
        now = self._clock()
        if is_well:
            self._well_at = now
        if now - self._well_at < self._timeout_s:
            return None
        return f"the server hung: nothing came from it for rollout.server_hang_timeout_s={self._timeout_s:g}"

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
        """Tell whether an idle server generates a token, or is paused."""
        if await client.is_paused():
            return True
        with trio.move_on_after(self.interval_s / 2):
            async with _open(self._url, self._api_key) as http:
                return await _samples_one(http)
        return await client.is_paused()  # meanwhile


def _open(url: str, api_key: str | None) -> HttpClient:
    return HttpClient(url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})


async def _samples_one(http: HttpClient) -> bool:
    """Ask for one token; tell whether the answer is a generation. Unlike the client of rollouts, it minds no version, nor an abort.

    Raises:
        ServerError: the reply is no JSON.
    """
    body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
    reply = await http.request("POST", "/generate", json=body)
    if reply.status != 200:
        return False
    answer = reply.json()
    return isinstance(answer, Mapping) and isinstance(answer.get("output_ids"), list)


async def _answer_of(question: Callable[[], Awaitable[T]], timeout_s: float) -> T | None:
    """Return the answer, None when a server fails or does not give one within `timeout_s`."""
    with trio.move_on_after(timeout_s), suppress(ServerError):
        return await question()
    return None
