"""One server as the router sees it: its running requests, whether it is up, and its last sign of life."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import trio

from agentrl.errors import RequestRefused, ServerError
from agentrl.servers.breaker import CircuitBreaker
from agentrl.servers.protocol import Pulse, ServerLoad
from agentrl.servers.streamed import StreamedTokens
from agentrl.types import Generation, SamplingParams

DRAIN_PAUSE_S = 0.5
MAX_DRAIN_PAUSE_S = 30.0
"""A drained server is probed after DRAIN_PAUSE_S. The pause doubles each time a probe succeeds but the next
generation fails: a server that fails immediately always has the least load and would attract all requests."""
QUESTION_TIMEOUT_S = 10.0
"""Deadline of a request that a server should answer immediately: its state, or one token."""
LEAVE_GRACE_S = 2.0
"""Seconds that requests on a server being left have to return their partial tokens."""


class Client(Protocol):
    """The part of SGLangClient that the router needs."""

    async def generate(self, input_ids: Sequence[int], params: SamplingParams, *, rid: str) -> Generation: ...

    async def abort(self, rid: str) -> None: ...

    async def settle_aborts(self) -> None: ...

    async def serves(self, version: int) -> bool: ...

    async def pulse(self) -> Pulse: ...

    async def aclose(self) -> None: ...


@runtime_checkable
class StreamingClient(Protocol):
    """A client that also tells tokens while they are sampled."""

    async def stream(
        self, input_ids: Sequence[int], params: SamplingParams, *, rid: str, into: StreamedTokens
    ) -> Generation: ...


class Server:
    """A server. It starts drained: a probe must succeed before it receives requests.

    silence_s: the server hangs if it has running generations, and for this long none is answered and its load
        does not change, unless it is paused.
    max_pause_s: a pause that lasts longer is no excuse for silence.
    """

    def __init__(self, url: str, client: Client, *, silence_s: float, max_pause_s: float) -> None:
        self.url = url
        self.client = client
        self.outstanding_tokens = 0  # estimated tokens still to be computed for running requests
        self.breaker = CircuitBreaker(
            max_failures=1, pause_s=DRAIN_PAUSE_S, max_pause_s=MAX_DRAIN_PAUSE_S, is_open=True
        )
        self.is_retired = False
        self._silence_s = silence_s
        self._max_pause_s = max_pause_s
        self._running: dict[str, trio.CancelScope] = {}
        self._idle = trio.Event()
        self._last_sign = 0.0
        self._last_load: ServerLoad | None = None
        self._paused_since: float | None = None
        self.why_down = (
            "it has not been polled yet"  # result of the last probe; meaningless while the server is up
        )

    @property
    def running(self) -> list[str]:
        """The ids of the requests running on this server."""
        return list(self._running)

    @property
    def is_up(self) -> bool:
        return not self.is_retired and not self.breaker.is_open

    # --------------------------------------------------------------------------------------------- generation

    async def ask(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        rid: str,
        tokens: int,
        into: StreamedTokens | None = None,
    ) -> Generation | None:
        """Sample one piece; None if the server was left before it answered.

        `tokens`: the load of the request, counted as outstanding while it runs. `into`: is told the tokens as
        they are sampled, if the client can.

        Raises:
            ServerError: the client failed. Unless it is RequestRefused, the server is now drained.
        """
        ticket = self.breaker.begin(trio.current_time())
        assert ticket is not None, "only a server that is up is asked"
        if not self._running:
            self._sign()
            self._idle = trio.Event()
        self.outstanding_tokens += tokens
        tell = self.breaker.abandoned
        with trio.CancelScope() as scope:
            self._running[rid] = scope
            try:
                if into is not None and isinstance(self.client, StreamingClient):
                    generation = await self.client.stream(prompt, params, rid=rid, into=into)
                else:
                    generation = await self.client.generate(prompt, params, rid=rid)
                tell = self._answered
                return generation
            except RequestRefused:
                tell = self._answered
                raise
            except ServerError:
                self.breaker.failed(ticket, trio.current_time())
                raise
            finally:
                tell(ticket)
                del self._running[rid]
                self.outstanding_tokens -= tokens
                if not self._running:
                    self._idle.set()
        return None

    async def leave(self) -> None:
        """End all running requests so that they move to other servers, with their partial tokens if the
        server returns them.
        """
        if not self._running:
            return
        with trio.move_on_after(LEAVE_GRACE_S):
            try:
                for rid in list(self._running):
                    await self.client.abort(rid)
                await self._idle.wait()
            except ServerError:
                pass  # the server is gone
        for scope in self._running.values():
            scope.cancel()  # a vanished host never closes its connections

    # ------------------------------------------------------------------------------------------------- health

    async def probe(self, version: int) -> bool:
        """If the pause of a drained server is over, check that it samples with `version`.

        Returns whether it is up.
        """
        ticket = self.breaker.begin(trio.current_time())
        if ticket is None:
            return False
        tell = self.breaker.abandoned
        self.why_down = f"no answer within {QUESTION_TIMEOUT_S:g} s"
        try:
            with trio.move_on_after(QUESTION_TIMEOUT_S):
                if await self.client.serves(version):
                    tell = self.breaker.succeeded
                else:
                    self.why_down = f"it does not serve version {version} yet"
        except ServerError as error:  # not there yet, or still broken: the next probe follows
            self.why_down = str(error)
        finally:
            tell(ticket)
        return self.is_up

    async def hangs(self) -> bool:
        """Return whether the server hangs (see `silence_s`). Call it often."""
        silent_s = trio.current_time() - self._last_sign
        if not self._running or silent_s < self._silence_s / 2:
            return False
        pulse = await self._pulse()
        if pulse is not None and (self._is_in_pause(pulse) or pulse.load != self._last_load):
            self._last_load = pulse.load
            self._sign()
            return False
        return bool(self._running) and trio.current_time() - self._last_sign >= self._silence_s

    def drain(self) -> None:
        """Send no more requests to the server until a probe succeeds."""
        now = trio.current_time()
        ticket = self.breaker.begin(now)
        if ticket is not None:
            self.breaker.failed(ticket, now)

    async def _pulse(self) -> Pulse | None:
        """Return the server's reported state; None if it does not answer."""
        with trio.move_on_after(QUESTION_TIMEOUT_S):
            try:
                return await self.client.pulse()
            except ServerError:
                return None
        return None

    def _is_in_pause(self, pulse: Pulse) -> bool:
        now = trio.current_time()
        if not pulse.is_paused:
            self._paused_since = None
            return False
        if self._paused_since is None:
            self._paused_since = now
        return now - self._paused_since < self._max_pause_s

    def _answered(self, ticket: int) -> None:
        self.breaker.succeeded(ticket)
        self._paused_since = None
        self._sign()

    def _sign(self) -> None:
        self._last_sign = trio.current_time()
