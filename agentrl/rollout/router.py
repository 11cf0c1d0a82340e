"""Which server answers which turn; a generation that was interrupted, or whose server died, goes on unnoticed by agents.

A server is up, or down until a probe finds it ready with the published weights (or newer). A new server, one that did not
answer and one that failed are down. A paused server is up: its requests hang until it resumes, which only the
trajectory's own deadline bounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np
import trio

from agentrl.errors import RequestRefused, ServerError
from agentrl.rollout.stats import IdleTime
from agentrl.sglang.protocol import ModelInfo
from agentrl.types import Generation, SamplingParams

FinishReason = Literal["stop", "length"]

PROBE_INTERVAL_S = 0.5
PROBE_TIMEOUT_S = 5.0
MAX_SERVER_FAILURES = 3
"""Failures of servers under ONE generation before it is given up: a request that kills servers must not go round."""
FAILURE_PAUSE_S = 0.2
"""Times the failures so far: an overloaded server needs a moment."""
EMPTY_CHUNK_PAUSE_S = 0.05
"""An abort in the waiting queue brings no token: without a pause, a server that aborts everything is asked in a tight loop."""


class Client(Protocol):
    """The part of SGLangClient the router needs."""

    async def generate(self, input_ids: Sequence[int], params: SamplingParams, *, rid: str) -> Generation: ...

    async def model_info(self) -> ModelInfo: ...

    async def aclose(self) -> None: ...


@dataclass
class _Server:
    url: str
    client: Client
    is_up: bool = False
    outstanding_tokens: int = 0  # of running requests: prompt plus what may still be sampled
    trajectories: set[str] = field(default_factory=set)  # that have their prefix in its cache
    requests: set[trio.CancelScope] = field(default_factory=set)  # running, to be moved when the server is retired


class Router:
    """Spreads generations over servers. `watch` must run beside it: it finds servers that come up.

    `connect` makes the client of a URL. `context_tokens` is the model's context, None when unknown: prompts and answers are
    kept below it, and ids below `vocab_size`, before anything is sent, because a server may not survive them. None: no id
    of the tokenizer is too large, and none is looked at.
    """

    def __init__(self, connect: Callable[[str], Client], *, vocab_size: int | None = None, context_tokens: int | None = None) -> None:
        self.context_tokens = context_tokens
        self._connect = connect
        self._vocab_size = vocab_size
        self._servers: dict[str, _Server] = {}
        self._version = 0
        self._affinity: dict[str, _Server] = {}
        self._changed = trio.Event()
        self._watch_lock = trio.Lock()
        self._retired: list[Client] = []
        self._request_numbers = itertools.count()
        self.idle = IdleTime()  # with no request running at any server
        self.num_interruptions = 0
        self.num_server_failures = 0

    # ----------------------------------------------------------------------------------------------------- servers

    def set_servers(self, urls: Sequence[str], *, version: int) -> None:
        """Use the servers at `urls`, of which each must have weights of at least `version` before it is asked.

        Servers that were up stay up: call this after a publish to them. Call it from the thread of trio.
        """
        self._version = version
        wanted = [url.rstrip("/") for url in urls]
        for url in [url for url in self._servers if url not in wanted]:
            self._retire(self._servers.pop(url))
        for url in wanted:
            if url not in self._servers:
                self._servers[url] = _Server(url, self._connect(url))
        self._notify()

    async def watch(self) -> None:
        """Probe the servers that are down, for ever; produces: servers that are up, which unblocks `generate`."""
        try:
            async with self._watch_lock:  # a second watcher only waits
                while True:
                    await self._close_retired()
                    async with trio.open_nursery() as nursery:
                        for server in self._servers.values():
                            if not server.is_up:
                                nursery.start_soon(self._probe, server)
                    changed = self._changed
                    with trio.move_on_after(PROBE_INTERVAL_S if self.num_up < len(self._servers) else float("inf")):
                        await changed.wait()
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(PROBE_TIMEOUT_S):
                await self._close_retired()

    async def aclose(self) -> None:
        """Close all connections."""
        for url in list(self._servers):
            self._retire(self._servers.pop(url))
        await self._close_retired()

    @property
    def num_up(self) -> int:
        return sum(server.is_up for server in list(self._servers.values()))

    def outstanding_tokens(self) -> dict[str, int]:
        """Return the tokens of running requests per URL."""
        return {url: server.outstanding_tokens for url, server in list(self._servers.items())}

    async def _probe(self, server: _Server) -> None:
        with trio.move_on_after(PROBE_TIMEOUT_S):
            try:
                info = await server.client.model_info()
            except ServerError:
                return
            if info.version is not None and info.version >= self._version:
                server.is_up = True
                self._notify()

    def _mark_down(self, server: _Server) -> None:
        self.num_server_failures += 1
        if server.is_up:
            server.is_up = False
            self._notify()

    def _retire(self, server: _Server) -> None:
        server.is_up = False
        self._retired.append(server.client)
        for key in server.trajectories:
            self._affinity.pop(key, None)
        for request in server.requests:
            request.cancel()  # a host that vanished never closes its connections

    async def _close_retired(self) -> None:
        while self._retired:
            await self._retired.pop().aclose()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # -------------------------------------------------------------------------------------------------- generation

    async def generate(self, input_ids: Sequence[int], params: SamplingParams, *, trajectory_key: str) -> Generation:
        """Sample one turn, to its end: interrupted pieces are joined, each token with the version that sampled it.

        Waits while no server is up; cancel it to bound that.

        Raises:
            RequestRefused: a server, or the check before sending, called the request wrong.
            ServerError: servers failed MAX_SERVER_FAILURES times under this generation.
        """
        self._check(input_ids, params)
        prompt = list(input_ids)
        pieces: list[Generation] = []
        while True:
            piece = await self._piece(prompt, params if not pieces else _rest(params, pieces), trajectory_key)
            pieces.append(piece)
            if (reason := _finish(pieces, params)) is not None:
                return _joined(pieces, reason)
            self.num_interruptions += 1
            prompt += piece.token_ids.tolist()
            if not len(piece.token_ids):
                await trio.sleep(EMPTY_CHUNK_PAUSE_S)

    def forget(self, trajectory_key: str) -> None:
        """Forget which server holds the trajectory's prefix: it is over."""
        server = self._affinity.pop(trajectory_key, None)
        if server is not None:
            server.trajectories.discard(trajectory_key)

    async def _piece(self, prompt: list[int], params: SamplingParams, key: str) -> Generation:
        """Ask servers until one answers."""
        failures = 0
        while True:
            server = await self._choose(key)
            try:
                piece = await self._ask(server, prompt, params, key)
            except RequestRefused:
                raise
            except ServerError as error:
                failures += 1
                self._mark_down(server)
                if failures == MAX_SERVER_FAILURES:
                    raise ServerError(f"servers failed {failures} times in turn, the last: {error}", status=error.status) from error
                await trio.sleep(failures * FAILURE_PAUSE_S)
            else:
                if piece is not None:
                    return piece
            self.forget(key)

    async def _ask(self, server: _Server, prompt: list[int], params: SamplingParams, key: str) -> Generation | None:
        """Send one request; None when the server was retired meanwhile."""
        cost = len(prompt) + params.max_new_tokens
        server.outstanding_tokens += cost
        self.idle.begin()
        with trio.CancelScope() as scope:
            server.requests.add(scope)
            try:
                return await server.client.generate(prompt, params, rid=f"{key}-{next(self._request_numbers)}")
            finally:
                server.requests.discard(scope)
                server.outstanding_tokens -= cost
                self.idle.end()
        return None

    async def _choose(self, key: str) -> _Server:
        """Return the server that has the trajectory's prefix, else the one with the least to do; wait for one to be up."""
        while True:
            server = self._affinity.get(key)
            if server is not None and server.is_up:
                return server
            self.forget(key)
            up = [server for server in self._servers.values() if server.is_up]
            if up:
                server = min(up, key=lambda s: (s.outstanding_tokens, len(s.trajectories)))
                self._affinity[key] = server
                server.trajectories.add(key)
                return server
            await self._changed.wait()

    def _check(self, input_ids: Sequence[int], params: SamplingParams) -> None:
        is_known = self._vocab_size is None or (len(input_ids) and min(input_ids) >= 0 and max(input_ids) < self._vocab_size)
        if not len(input_ids) or not is_known:
            raise RequestRefused(f"a prompt needs ids{'' if self._vocab_size is None else f' in 0..{self._vocab_size - 1}'}", status=400)
        if params.max_new_tokens < 1:
            raise RequestRefused(f"max_new_tokens={params.max_new_tokens}: at least 1 token must be asked for", status=400)
        total = len(input_ids) + params.max_new_tokens
        if self.context_tokens is not None and total > self.context_tokens:
            raise RequestRefused(f"prompt and answer of {total} tokens exceed the context of {self.context_tokens}", status=400)


def _finish(pieces: Sequence[Generation], params: SamplingParams) -> FinishReason | None:
    """Return why the joined generation is finished, None when it goes on."""
    last = pieces[-1]
    if last.finish_reason != "abort":
        return last.finish_reason
    # An interruption may come right behind the last token: going on would sample past the end.
    if len(last.token_ids) and int(last.token_ids[-1]) in params.stop_token_ids:
        return "stop"
    return "length" if sum(len(piece.token_ids) for piece in pieces) >= params.max_new_tokens else None


def _rest(params: SamplingParams, pieces: Sequence[Generation]) -> SamplingParams:
    """Return the parameters of what is left to sample behind `pieces`."""
    return replace(params, max_new_tokens=params.max_new_tokens - sum(len(piece.token_ids) for piece in pieces))


def _joined(pieces: Sequence[Generation], reason: FinishReason) -> Generation:
    if len(pieces) == 1 and pieces[0].finish_reason == reason:
        return pieces[0]
    return Generation(
        np.concatenate([piece.token_ids for piece in pieces]),
        np.concatenate([piece.logprobs for piece in pieces]),
        np.concatenate([piece.versions for piece in pieces]),
        reason,
        num_interruptions=len(pieces) - 1 + sum(piece.num_interruptions for piece in pieces),
    )
