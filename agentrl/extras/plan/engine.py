"""`VirtualServer`: a modelled inference server. Requests decode together; prefill has priority over them.

All running requests advance at the same pace, so one number describes their progress: `_ticks`, the tokens
that a request running since the start would have. Requests end in the order of the tick at which they are
complete. A tick lasts `base_s(batch) + kv_s * context`: it reads the weights and the whole KV cache, or
computes for as long. The context grows by one token per request and tick, so the time of several ticks is a
quadratic function, and the model needs no time steps.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import trio

from agentrl.errors import ServerError
from agentrl.servers.protocol import Pulse, ServerLoad
from agentrl.types import NO_VERSION, Generation

PauseMode = Literal["abort", "retract", "in_place"]
_ALMOST = 1e-6
"""Ticks: a request that lacks less than this is complete."""
_HEADROOM = 0.02
"""Share of the KV cache that admission leaves free for the growth of running requests."""


@dataclass(frozen=True, slots=True)
class ServerSpeed:
    """Speed and capacity of a server.

    base_s: seconds of a tick without context, by number of running requests.
    kv_s: seconds that each token of context adds to a tick.
    prefill_s: seconds per prompt token that is not cached.
    max_running: requests that decode at the same time.
    kv_tokens: capacity of the KV cache, prefix cache included.
    """

    base_s: Callable[[int], float]
    kv_s: float = 0.0
    prefill_s: float = 0.0
    max_running: int = 1 << 30
    kv_tokens: float = math.inf


@dataclass(eq=False, slots=True)
class _Job:
    """A request. end: tick at which it is complete. pieces: (version, tokens) that were sampled so far."""

    rid: str
    prefixes: tuple[str, str]
    prompt: int
    need: int
    value: int
    number: int
    end: float = 0.0
    cached: int = 0
    pieces: list[tuple[int, int]] = field(default_factory=list)
    num_retractions: int = 0
    is_running: bool = False
    outcome: Generation | ServerError | None = None
    over: trio.Event = field(default_factory=trio.Event)

    @property
    def done(self) -> int:
        return sum(count for _, count in self.pieces)


class VirtualServer:
    """A server: `generate` may be called by many tasks while `run` runs."""

    def __init__(self, speed: ServerSpeed) -> None:
        self._speed = speed
        self._numbers = itertools.count()
        self._running: dict[_Job, None] = {}
        self._ends: list[tuple[float, int, _Job]] = []
        self._waiting: deque[_Job] = deque()
        self._cache: OrderedDict[str, int] = OrderedDict()  # prefix -> tokens; unused first
        self._cached_tokens = 0
        self._context = 0.0  # tokens of running requests, prompts included
        self._ticks = 0.0
        self._stall_s = 0.0  # prefill that is still to be done
        self._now = 0.0
        self._hangs_since = 0.0
        self._timer = trio.CancelScope()
        self._resumed = trio.Event()
        self._resumed.set()
        self.version: int | None = None
        """None: the server is dead, or it has no published weights yet."""
        self.is_paused = False
        self.is_dead = False
        self.is_hanging = False
        self.busy_s = self.prefill_busy_s = self.paused_s = self.down_s = 0.0
        self.running_s = self.waiting_s = 0.0  # integrals over time of the numbers of requests
        self.sampled_tokens = self.prefilled_tokens = self.num_retractions = 0
        self.peak_kv_tokens = 0.0

    # ------------------------------------------------------------------------------------------- for requests

    async def generate(
        self, rid: str, prompt: int, need: int, value: int, prefixes: tuple[str, str]
    ) -> Generation:
        """Sample `need` tokens, each of which is `value`; an abort returns what was sampled so far.

        prefixes: keys of the attempt and of its first prompt, under which the prefix cache is searched.

        Raises:
            ServerError: the server is dead, or dies.
        """
        if self.is_dead:
            raise ServerError("connection refused")
        self._advance()
        job = _Job(rid, prefixes, prompt, need, value, next(self._numbers))
        self._waiting.append(job)
        self._admit()
        try:
            await job.over.wait()
        finally:
            if job.outcome is None:  # cancelled
                self._advance()
                self._remove(job)
                self._admit()
        if isinstance(job.outcome, ServerError):
            raise job.outcome
        assert job.outcome is not None, "its event is set with its outcome"
        self._remember(prefixes[0], prompt + len(job.outcome.token_ids))
        self._remember(prefixes[1], min(prompt, self._cache.get(prefixes[1], prompt)))
        return job.outcome

    async def serves(self, version: int) -> bool:
        """Return whether it samples with `version` or a later one. Waits while it is paused."""
        if self.is_dead:
            raise ServerError("connection refused")
        while self.is_paused or self.is_hanging:
            await self._resumed.wait()
        return self.version is not None and self.version >= version

    async def pulse(self) -> Pulse:
        if self.is_dead:
            raise ServerError("connection refused")
        while self.is_hanging:
            await self._resumed.wait()
        self._advance()
        used = int(self._context + self._ticks * max(1, len(self._running)))
        return Pulse(self.is_paused, ServerLoad(len(self._running), len(self._waiting), used, 1 << 40))

    def abort(self, rid: str) -> None:
        self._advance()
        for job in [job for job in (*self._running, *self._waiting) if job.rid == rid]:
            self._end(job, "abort")
        self._admit()

    # -------------------------------------------------------------------------------------------- for control

    def pause(self, mode: PauseMode) -> None:
        """Stop sampling. abort: requests return; retract: their KV cache is evicted; in_place: they stay."""
        self._advance()
        self.is_paused = True
        self._resumed = trio.Event()
        if mode == "abort":
            for job in [*self._running, *self._waiting]:
                self._end(job, "abort")
        elif mode == "retract":
            for job in reversed(list(self._running)):
                self._retract(job)
        if mode != "in_place":
            self._cache.clear()
            self._cached_tokens = 0
        self._set_timer()

    def set_version(self, version: int) -> None:
        """Load weights. Running requests go on with them."""
        self._advance()
        for job in self._running:
            self._close_piece(job)
        self.version = version

    def resume(self) -> None:
        self._advance()
        self.is_paused = self.is_hanging = False
        self._resumed.set()
        self._admit()

    def hang(self) -> None:
        """Stop answering, without a word."""
        self._advance()
        self.is_hanging = True
        self._hangs_since = self._now
        self._resumed = trio.Event()
        self._set_timer()

    def silent_s(self) -> float:
        """Return for how many seconds it has hung."""
        return trio.current_time() - self._hangs_since if self.is_hanging else 0.0

    def die(self) -> None:
        self._advance()
        for job in [*self._running, *self._waiting]:
            self._remove(job)
            job.outcome = ServerError("the server closed the connection")
            job.over.set()
        self.is_dead, self.version, self.is_paused, self.is_hanging = True, None, False, False
        self._resumed.set()
        self._cache.clear()
        self._cached_tokens = 0
        self._set_timer()

    def restart(self) -> None:
        self._advance()
        self.is_dead = False
        self._stall_s = 0.0

    async def run(self) -> None:
        """Complete requests when it is time, until cancelled."""
        self._now = trio.current_time()
        while True:
            with trio.CancelScope(deadline=self._next_event()) as self._timer:
                await trio.sleep_forever()
            self._advance()
            self._complete()
            self._admit()

    def counters(self) -> dict[str, float]:
        """Return seconds by what it did, and integrals over time of its requests."""
        self._advance()
        return {
            "busy_s": self.busy_s,
            "prefill_s": self.prefill_busy_s,
            "paused_s": self.paused_s,
            "down_s": self.down_s,
            "running_s": self.running_s,
            "waiting_s": self.waiting_s,
        }

    @property
    def peak_kv_share(self) -> float:
        """Largest part of the KV cache that running requests used."""
        return self.peak_kv_tokens / self._speed.kv_tokens

    # -------------------------------------------------------------------------------------------------- model

    @property
    def _is_stopped(self) -> bool:
        return self.is_paused or self.is_dead or self.is_hanging

    def _advance(self) -> None:
        """Bring the model to the present."""
        now = trio.current_time()
        elapsed, self._now = now - self._now, now
        if not elapsed:
            return
        self.running_s += elapsed * len(self._running)
        self.waiting_s += elapsed * len(self._waiting)
        if self._is_stopped:
            self.paused_s += elapsed * self.is_paused
            self.down_s += elapsed * (self.is_dead or self.is_hanging)
            return
        stalled = min(self._stall_s, elapsed)
        self._stall_s -= stalled
        self.prefill_busy_s += stalled
        if not self._running:
            self.busy_s += stalled
            return
        self.busy_s += elapsed
        ticks = self._ticks_in(elapsed - stalled)
        self._ticks += ticks
        self._context += ticks * len(self._running)
        self.peak_kv_tokens = max(self.peak_kv_tokens, self._context)

    def _ticks_in(self, seconds: float) -> float:
        base, slope = self._pace()
        if slope == 0.0:
            return seconds / base
        return (math.sqrt(base * base + 2 * slope * seconds) - base) / slope

    def _seconds_of(self, ticks: float) -> float:
        base, slope = self._pace()
        return base * ticks + slope * ticks * ticks / 2

    def _pace(self) -> tuple[float, float]:
        """Return the seconds of the next tick, and by how much each later one is longer."""
        batch = len(self._running)
        return self._speed.base_s(batch) + self._speed.kv_s * self._context, self._speed.kv_s * batch

    def _next_event(self) -> float:
        if self._is_stopped or not self._running:
            return math.inf
        ticks = self._ends[0][0] - self._ticks
        room = (self._speed.kv_tokens - self._context) / len(self._running)
        if len(self._running) > 1:
            ticks = min(ticks, max(0.0, room))
        return trio.current_time() + self._stall_s + self._seconds_of(max(0.0, ticks))

    def _set_timer(self) -> None:
        self._timer.deadline = self._next_event()

    def _complete(self) -> None:
        """End the requests that are complete; evict the newest if the KV cache is full."""
        while self._ends and self._ends[0][0] <= self._ticks + _ALMOST:
            job = self._ends[0][2]
            self._end(job, "stop")
        while len(self._running) > 1 and self._context >= self._speed.kv_tokens * (1 - 1e-9):
            self._retract(next(reversed(self._running)))

    def _admit(self) -> None:
        """Start waiting requests for which there is room, in their order."""
        if not self._is_stopped and self.version is not None:
            while self._waiting and len(self._running) < self._speed.max_running:
                job = self._waiting[0]
                size = job.prompt + job.done
                room = self._speed.kv_tokens * (1 - _HEADROOM) - self._context
                if self._running and size > room:
                    break
                self._waiting.popleft()
                self._start(job, size)
        self._set_timer()

    def _start(self, job: _Job, size: int) -> None:
        job.cached = min(size - 1, max(self._cache.get(key, 0) for key in job.prefixes))
        self._cached_tokens -= self._cache.pop(job.prefixes[0], 0)  # counted in the context from here on
        computed = size - job.cached
        self._stall_s += computed * self._speed.prefill_s
        self.prefilled_tokens += computed
        self._context += size
        job.end = self._ticks + job.need - job.done
        job.is_running = True
        self._running[job] = None
        heapq.heappush(self._ends, (job.end, job.number, job))
        self._evict()

    def _close_piece(self, job: _Job) -> None:
        """Note the tokens that were sampled since the last change of version."""
        done = min(job.need, max(job.done, int(job.need - (job.end - self._ticks) + _ALMOST)))
        if done > job.done:
            assert self.version is not None, "only a server with weights samples"
            job.pieces.append((self.version, done - job.done))

    def _end(self, job: _Job, reason: Literal["stop", "abort"]) -> None:
        if job.is_running:
            self._close_piece(job)
        self._remove(job)
        self.sampled_tokens += job.done
        job.outcome = _generation(job, "abort" if reason == "abort" and job.done < job.need else "stop")
        job.over.set()

    def _retract(self, job: _Job) -> None:
        self._close_piece(job)
        self._remove(job)
        job.num_retractions += 1
        self.num_retractions += 1
        self._waiting.appendleft(job)

    def _remove(self, job: _Job) -> None:
        if job.is_running:
            job.is_running = False
            del self._running[job]
            self._ends.remove((job.end, job.number, job))
            heapq.heapify(self._ends)
            # Its fraction of a token is given up.
            self._context -= job.prompt + job.need - (job.end - self._ticks)
            self._context = max(0.0, self._context) if self._running else 0.0
        elif job in self._waiting:
            self._waiting.remove(job)

    def _remember(self, key: str, tokens: int) -> None:
        self._cached_tokens += tokens - self._cache.pop(key, 0)
        self._cache[key] = tokens
        self._evict()

    def _evict(self) -> None:
        while self._cache and self._cached_tokens + self._context > self._speed.kv_tokens:
            self._cached_tokens -= self._cache.popitem(last=False)[1]


def _generation(job: _Job, reason: Literal["stop", "abort"]) -> Generation:
    count = job.done
    versions = np.repeat(
        np.array([version for version, _ in job.pieces], np.int32), [count for _, count in job.pieces]
    )
    assert NO_VERSION not in versions, "tokens have the version that sampled them"
    return Generation(
        np.full(count, job.value, np.int32),
        np.zeros(count, np.float32),
        versions,
        reason,
        num_cached_tokens=job.cached,
        num_retractions=job.num_retractions,
    )
