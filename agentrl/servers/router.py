"""The router: chooses the server of each turn. Interrupted generations and server failures are invisible to
agents.

A server is either up or drained. A server that joins, fails or hangs is drained until a probe shows that it
samples with the published weights or newer ones. A paused server is up: its requests wait until it resumes,
bounded only by the trajectory's deadline.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import trio

from agentrl.errors import RequestRefused, ServerError
from agentrl.servers.affinity import Affinity, TurnLengths, Work, uncached
from agentrl.servers.idle_time import IdleTime
from agentrl.servers.pace import TokenPace
from agentrl.servers.pool import TEND_INTERVAL_S, ServerPool
from agentrl.servers.server import Client
from agentrl.servers.streamed import Hear, StreamedTokens
from agentrl.types import Generation, SamplingParams

FinishReason = Literal["stop", "length"]

MAX_SERVER_FAILURES = 3
"""Server failures during ONE generation before it fails: a request that kills servers must not visit all of
them.
"""
FAILURE_PAUSE_S = 0.2
"""Pause before a retry, multiplied by the failures so far."""
EMPTY_CHUNK_PAUSE_S = 0.05
"""Pause after an abort without tokens.

It prevents a busy loop with a server that aborts every queued request.
"""
MAX_SILENCE_S = 60.0
MAX_PAUSE_S = 120.0


class Router:
    """Spreads generations over servers. `watch` must run concurrently: it detects servers that come up.

    Args:
        connect: creates the client of a URL.
        vocab_size: prompt ids must be below it, because larger ids can crash a server. This is checked before
            sending.
            None: the tokenizer has no larger ids, so nothing is checked.
        context_tokens: the model's context. Prompt plus answer must fit, which is checked before sending.
            None: unknown.
        max_silence_s: a server that answers no running generation for this long, without any change of its
            load, hangs. It is drained unless it is paused.
        max_pause_s: a server that is paused for longer counts as hanging.
        tend_s: interval between two checks of a server.
    """

    def __init__(
        self,
        connect: Callable[[str], Client],
        *,
        vocab_size: int | None = None,
        context_tokens: int | None = None,
        max_silence_s: float = MAX_SILENCE_S,
        max_pause_s: float = MAX_PAUSE_S,
        tend_s: float = TEND_INTERVAL_S,
    ) -> None:
        self.context_tokens = context_tokens
        self._vocab_size = vocab_size
        self._pool = ServerPool(connect, silence_s=max_silence_s, max_pause_s=max_pause_s, tend_s=tend_s)
        self._affinity = Affinity()
        self._lengths = TurnLengths()
        self._request_numbers = itertools.count()
        self.idle = IdleTime()  # time without a running request
        self.work = Work()
        self.pace = TokenPace()
        self.num_interruptions = 0
        self.num_server_failures = 0

    # ------------------------------------------------------------------------------------------------ servers

    def set_servers(self, urls: Sequence[str], *, version: int) -> None:
        """Use the servers at `urls`. A server that joins or recovers must first have weights of at least
        `version`.

        Servers that are up stay up, so call this after publishing to them. Requests on servers not in `urls`
        continue on other servers. Call it from the trio thread.
        """
        self._pool.set_servers(urls, version=version)

    async def watch(self) -> None:
        """Probe, drain and leave servers until cancelled. Servers that come up unblock `generate`."""
        await self._pool.watch()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._pool.aclose()

    @property
    def num_up(self) -> int:
        return len(self._pool.up)

    @property
    def num_drained(self) -> int:
        """Number of times a server was drained because it failed or hung."""
        return self._pool.num_drained

    def outstanding_tokens(self) -> dict[str, int]:
        """Return the estimated number of tokens still to be computed for running requests, by URL."""
        return self._pool.outstanding_tokens()

    def places(self) -> dict[str, str]:
        """Return the URL at which each attempt currently generates: attempt key -> URL. Thread-safe."""
        return {rid.rpartition("-")[0]: url for rid, url in self._pool.places().items()}

    # --------------------------------------------------------------------------------------------- generation

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        trajectory_key: str,
        hear: Hear | None = None,
    ) -> Generation:
        """Sample one complete turn. Interrupted pieces are joined; each token keeps the version that sampled
        it.

        Waits without limit while no server is up; cancel it to bound the wait.

        Args:
            hear: is told the tokens as they are sampled, by servers that stream. What it was told is never
                sampled again: a piece whose request failed ends with its last token that arrived.

        Raises:
            RequestRefused: a server, or the check before sending, rejected the request.
            ServerError: servers failed MAX_SERVER_FAILURES times in a row; or a request failed, and the
                tokens that were told cannot be recorded.
        """
        self._check(input_ids, params)
        prompt = input_ids
        pieces: list[Generation] = []
        failures = 0  # since the last piece
        while True:
            num_sampled = len(prompt) - len(input_ids)
            into = None if hear is None else StreamedTokens(hear)
            piece = None
            try:
                piece = await self._ask(prompt, _rest(params, pieces), trajectory_key, num_sampled, into)
            except RequestRefused:
                raise
            except ServerError as error:
                failures += 1
                self.num_server_failures += 1
                piece = None if into is None else into.partial()
                if piece is None and failures == MAX_SERVER_FAILURES:
                    raise ServerError(
                        f"{failures} consecutive server failures, the last: {error}", status=error.status
                    ) from error
                if piece is None:
                    await trio.sleep(failures * FAILURE_PAUSE_S)
                    continue
            if piece is None:  # its server was left: ask another one
                piece = None if into is None else into.partial()
                if piece is None:
                    continue
            failures = 0
            pieces.append(piece)
            if (reason := _finish(pieces, params)) is not None:
                whole = _joined(pieces, reason)
                self._lengths.add(len(whole.token_ids))
                return whole
            self.num_interruptions += 1
            prompt = [*prompt, *piece.token_ids.tolist()]
            if not len(piece.token_ids):
                await trio.sleep(EMPTY_CHUNK_PAUSE_S)

    def forget(self, trajectory_key: str) -> None:
        """Forget which server holds the prefix of an attempt that is over."""
        self._affinity.forget(trajectory_key)

    async def _ask(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        key: str,
        num_sampled: int,
        into: StreamedTokens | None,
    ) -> Generation | None:
        """Wait for a server that is up and send one request; None if that server was left before it
        answered.

        `num_sampled`: tokens at the end of the prompt that this turn already sampled.
        """
        while not (up := self._pool.up):
            await self._pool.until_changed()
        prefix = self._affinity.place(key, prompt, up)
        tokens = uncached(prefix, len(prompt), version=self._pool.version)
        tokens += self._lengths.expected_rest(num_sampled, limit=params.max_new_tokens)
        rid = f"{key}-{next(self._request_numbers)}"
        self.idle.begin()
        try:
            with self.pace.request(prefix.server.url) as answers:
                piece = await prefix.server.ask(prompt, params, rid=rid, tokens=tokens, into=into)
                if piece is not None:
                    answers.append(piece)
        finally:
            self.idle.end()
        if piece is not None:
            self.work.count(prefix, len(prompt), piece)
        return piece

    def _check(self, input_ids: Sequence[int], params: SamplingParams) -> None:
        is_known = self._vocab_size is None or (
            len(input_ids) and min(input_ids) >= 0 and max(input_ids) < self._vocab_size
        )
        if not len(input_ids) or not is_known:
            raise RequestRefused(
                f"a prompt needs ids{'' if self._vocab_size is None else f' in 0..{self._vocab_size - 1}'}",
                status=400,
            )
        if params.max_new_tokens < 1:
            raise RequestRefused(f"max_new_tokens={params.max_new_tokens}: must be at least 1", status=400)
        total = len(input_ids) + params.max_new_tokens
        if self.context_tokens is not None and total > self.context_tokens:
            raise RequestRefused(
                f"prompt and answer of {total} tokens exceed the context of {self.context_tokens}", status=400
            )


def _finish(pieces: Sequence[Generation], params: SamplingParams) -> FinishReason | None:
    """Return why the joined generation is finished; None if it must continue."""
    last = pieces[-1]
    if last.finish_reason != "abort":
        return last.finish_reason
    # An interruption can come right after the last token: continuing would sample past the end.
    if len(last.token_ids) and int(last.token_ids[-1]) in params.stop_token_ids:
        return "stop"
    return "length" if sum(len(piece.token_ids) for piece in pieces) >= params.max_new_tokens else None


def _rest(params: SamplingParams, pieces: Sequence[Generation]) -> SamplingParams:
    """Return the parameters for the rest of the turn after `pieces`."""
    if not pieces:
        return params
    rest = replace(
        params, max_new_tokens=params.max_new_tokens - sum(len(piece.token_ids) for piece in pieces)
    )
    if params.experts_from is None:
        return rest
    known = sum(len(piece.experts) for piece in pieces if piece.experts is not None)
    return replace(rest, experts_from=params.experts_from + known)


def _joined(pieces: Sequence[Generation], reason: FinishReason) -> Generation:
    if len(pieces) == 1 and pieces[0].finish_reason == reason:
        return pieces[0]
    experts = [piece.experts for piece in pieces if piece.experts is not None]
    return Generation(
        np.concatenate([piece.token_ids for piece in pieces]),
        np.concatenate([piece.logprobs for piece in pieces]),
        np.concatenate([piece.versions for piece in pieces]),
        reason,
        num_interruptions=len(pieces) - 1 + sum(piece.num_interruptions for piece in pieces),
        num_cached_tokens=pieces[0].num_cached_tokens,
        num_retractions=sum(piece.num_retractions for piece in pieces),
        experts=np.concatenate(experts) if experts else None,
    )
