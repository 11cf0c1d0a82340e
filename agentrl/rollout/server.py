"""One server as the router sees it: what runs on it, whether it may be asked, and when it last gave a sign of life."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import trio

from agentrl.errors import RequestRefused, ServerError
from agentrl.rollout.breaker import CircuitBreaker
from agentrl.sglang.protocol import Pulse, ServerLoad
from agentrl.types import Generation, SamplingParams

DRAIN_PAUSE_S = 0.5
MAX_DRAIN_PAUSE_S = 30.0
"""A drained server is probed after DRAIN_PAUSE_S, doubled each time that the next generation fails although the probe did not: what
fails at once has nothing to do, and would draw all that is sent."""
QUESTION_TIMEOUT_S = 10.0
"""A question that a server should answer at once: its state, or one token."""
LEAVE_GRACE_S = 2.0
"""What runs on a server that is left may take so long to come back with the tokens it has."""


class Client(Protocol):
    """The part of SGLangClient the router needs."""

    async def generate(self, input_ids: Sequence[int], params: SamplingParams, *, rid: str) -> Generation: ...

    async def abort(self, rid: str) -> None: ...

    async def settle_aborts(self) -> None: ...

    async def serves(self, version: int) -> bool: ...

    async def pulse(self) -> Pulse: ...

    async def aclose(self) -> None: ...


class Server:
    """A server that begins drained: one probe must succeed before it is asked.

    silence_s: with generations under way, a server that answers none of them for so long, whose load stands still and that is not
    paused, hangs. max_pause_s: a longer pause is no pause.
    """

    def __init__(self, url: str, client: Client, *, silence_s: float, max_pause_s: float) -> None:
        self.url = url
        self.client = client
        self.outstanding_tokens = 0  # of running requests: what is still to be computed for them
        self.breaker = CircuitBreaker(max_failures=1, pause_s=DRAIN_PAUSE_S, max_pause_s=MAX_DRAIN_PAUSE_S, is_open=True)
        self.is_retired = False
        self._silence_s = silence_s
        self._max_pause_s = max_pause_s
        self._running: dict[str, trio.CancelScope] = {}
        self._idle = trio.Event()
        self._last_sign = 0.0
        self._last_load: ServerLoad | None = None
        self._paused_since: float | None = None
        self.why_down = "it has not been asked yet"  # what the last probe found; of no meaning while the server is up

    @property
    def running(self) -> list[str]:
        """The ids of the requests that run here."""
        return list(self._running)

    @property
    def is_up(self) -> bool:
        return not self.is_retired and not self.breaker.is_open

    # -------------------------------------------------------------------------------------------------- generation

    async def ask(self, prompt: Sequence[int], params: SamplingParams, *, rid: str, tokens: int) -> Generation | None:
        """Sample one piece, which counts as `tokens` outstanding ones meanwhile; None when the server was left before it answered.

        Raises:
            ServerError: as the client; unless it is RequestRefused, the server is drained now.
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
        """Move what runs here elsewhere: with the tokens that it has if the server still gives them, else without."""
        if not self._running:
            return
        with trio.move_on_after(LEAVE_GRACE_S):
            try:
                for rid in list(self._running):
                    await self.client.abort(rid)
                await self._idle.wait()
            except ServerError:
                pass  # it is gone
        for scope in self._running.values():
            scope.cancel()  # a host that vanished never closes its connections

    # ------------------------------------------------------------------------------------------------------ health

    async def probe(self, version: int) -> bool:
        """Bring a drained server back if its pause is over and it samples with `version`; tell whether it is up."""
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
        """Tell whether the server has gone silent; to be called often."""
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
        """Ask it nothing more until a probe succeeds."""
        now = trio.current_time()
        ticket = self.breaker.begin(now)
        if ticket is not None:
            self.breaker.failed(ticket, now)

    async def _pulse(self) -> Pulse | None:
        """Return what the server says of itself; None when it says nothing."""
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
