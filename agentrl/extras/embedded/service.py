"""Handling of requests between HTTP and the engine: admission, pause, abort, weight updates, versions.

Every request passes a gate. The gate is shut while the server is paused and while weights are replaced;
requests that arrive then wait. Weights change only while nothing runs. Therefore all tokens of a request have
one version, unless the version is merely renamed.

Everything here runs on one event loop: state changes between two `await`s are atomic.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from agentrl.config.rollout import MAX_ADAPTERS
from agentrl.extras.embedded.adapter import Adapter
from agentrl.extras.embedded.bodies import BadRequest
from agentrl.extras.embedded.bounded_repr import shown
from agentrl.extras.embedded.engine import Engine, Job
from agentrl.extras.embedded.groups import UpdateGroups, WrongState
from agentrl.extras.embedded.image_rows import key_of
from agentrl.extras.embedded.memory import LentMemory
from agentrl.extras.embedded.requests import GenerateRequest
from agentrl.extras.embedded.threads import in_thread
from agentrl.extras.embedded.weights import Undo, Weights, WeightSpec, WeightsRefused, name_of
from agentrl.servers.protocol import adapter_tensor

_RELEASED = "the memory of the weights is released; call resume_memory_occupation before an update"


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of an output were sampled under `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Result:
    """One answered request. `message` is set only for "abort", `matched` only for "stop"."""

    request: GenerateRequest
    samples: Sequence[tuple[int, float]]  # (token, logprob)
    spans: Sequence[VersionSpan]
    version: str
    finish: Literal["stop", "length", "abort"]
    seconds: float
    matched: int | None = None
    message: str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[float] | None = None  # of the tokens after `request.prompt_logprobs_from`
    experts: NDArray[np.int16] | None = None  # of the tokens from `request.experts_from` to the last but one


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that requests may name."""

    folder: str
    adapter: Adapter


@dataclass(eq=False)
class _Entry:
    """A request in flight. `job` is None until the engine accepts it.

    `starts` has (version, index of the first token sampled under it). is_aborted: before it had a job.
    """

    request: GenerateRequest
    arrived: float
    admitted: asyncio.Future[bool] | None = None
    job: Job | None = None
    starts: list[tuple[str, int]] = field(default_factory=list)
    prompt_logprobs: list[float] | None = None
    is_aborted: bool = False


@dataclass(eq=False)
class _Session:
    """Distributed updates between `begin_update` and `end_update`.

    version: the version before the session. undo: the values that it overwrote.
    num_coming: updates that have begun and not ended.
    staged: weights that arrived and wait for the end of the session, while requests are sampled on with the
        old ones; None: each update replaces weights at once, and no request runs.
    next_version: of the staged weights; None until the last update of the session.
    """

    version: str
    undo: Undo = field(default_factory=Undo)
    num_coming: int = 0
    staged: dict[str, Tensor] | None = None
    next_version: str | None = None


class Service:
    """The state of one server. SGLang calls `version` weight_version."""

    def __init__(self, engine: Engine, weights: Weights, *, model_path: str, version: str) -> None:
        self.engine = engine
        self.model_path = model_path
        self.version = version
        self.is_paused = False
        self.is_warm = False
        self.adapters: dict[str, LoadedAdapter] = {}
        self._weights = weights
        # None: unknown. Only weights from the learner's disk transport have a name.
        self._weights_name: str | None = None
        self._entries: dict[str, _Entry] = {}
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._holds = 0  # number of updates that keep the gate shut
        self._session: _Session | None = None
        self._is_released = False
        self._lent: LentMemory | None = None
        self._update_lock = asyncio.Lock()
        # One reader at a time: each holds a second copy of the model in memory.
        self._disk_lock = asyncio.Lock()
        self.groups = UpdateGroups()

    # ----------------------------------------------------------------------------------------------- requests

    def check_rids(self, requests: Sequence[GenerateRequest]) -> None:
        for request in requests:
            if request.rid in self._entries:
                raise BadRequest(f"Duplicate request ID detected: {request.rid}")

    async def generate(self, request: GenerateRequest) -> Result:
        """Sample one continuation. Cancelling this call removes the request from the engine.

        Raises:
            BadRequest: another request with this rid is in flight, or its adapter is not loaded when it is
                admitted.
            EngineError: the engine died.
            NotFinite: the model computes NaN or infinities for this prompt.
        """
        self.check_rids([request])
        entry = _Entry(request, time.monotonic())
        self._entries[request.rid] = entry
        try:
            was_admitted = await self._admit(entry)
            if was_admitted and request.prompt_logprobs_from is not None:
                await self._score(entry, request.prompt_logprobs_from)
            elif was_admitted and request.max_new_tokens > 0:
                await self._run(entry)
            return self._result(entry, was_admitted=was_admitted)
        finally:
            del self._entries[request.rid]

    def so_far(self, rid: str) -> Result | None:
        """Return what a running request has sampled so far, without experts; None if it samples nothing."""
        entry = self._entries.get(rid)
        if entry is None or entry.job is None:
            return None
        samples = list(entry.job.samples)
        spans = _spans(entry.starts, len(samples))
        return Result(
            entry.request, samples, spans, self.version, "abort", seconds=time.monotonic() - entry.arrived
        )

    async def _admit(self, entry: _Entry) -> bool:
        """Wait until the gate is open. Return False if the request was aborted while it waited."""
        while not self._is_open:
            entry.admitted = asyncio.get_running_loop().create_future()
            if not await entry.admitted:
                return False
        return True

    async def _run(self, entry: _Entry) -> None:
        request = entry.request
        # After the gate: a request that waited for a publish sees the adapter that it brought.
        if request.adapter is not None and request.adapter not in self.adapters:
            raise BadRequest(f"no LoRA adapter {shown(request.adapter)} is loaded; {self._loaded_text()}")
        with self._running():
            images = await self.engine.embed(request.images) if request.images else ()
            if entry.is_aborted:
                return
            job = self.engine.submit(
                request.input_ids,
                max_new_tokens=request.max_new_tokens,
                stop_ids=request.stop_ids,
                sampling=request.sampling,
                adapter=request.adapter,
                records_experts=request.experts_from is not None,
                images=images,
                images_key=key_of(request.images),
            )
            entry.job = job
            entry.starts = [(self.version, 0)]
            try:
                await job.finished
            finally:
                self.engine.cancel(job)

    async def _score(self, entry: _Entry, first: int) -> None:
        with self._running():
            entry.prompt_logprobs = await self.engine.prompt_logprobs(entry.request.input_ids, first=first)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Count a request that runs: weights change only while none does."""
        self._num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if self._num_running == 0:
                self._idle.set()

    def _loaded_text(self) -> str:
        return f"loaded: {', '.join(map(repr, self.adapters))}" if self.adapters else "none is"

    def _result(self, entry: _Entry, *, was_admitted: bool) -> Result:
        request = entry.request
        samples = list(entry.job.samples) if entry.job else []
        last = samples[-1][0] if samples else None
        result = partial(
            Result,
            request,
            samples,
            _spans(entry.starts, len(samples)),
            self.version,
            seconds=time.monotonic() - entry.arrived,
            num_cached_tokens=(entry.job and entry.job.num_cached_tokens) or 0,
            experts=_experts(entry, len(samples)),
            prompt_logprobs=entry.prompt_logprobs,
        )
        if not was_admitted:
            return result(finish="abort", message="Abort in waiting queue")
        if last in request.stop_ids:
            return result(finish="stop", matched=last)
        if len(samples) >= request.max_new_tokens:
            return result(finish="length")
        return result(finish="abort", message="Aborted")

    def abort(self, rid: str) -> None:
        """End one request, keeping the tokens sampled so far. An unknown rid is ignored."""
        entry = self._entries.get(rid)
        if entry is None:
            return
        if entry.job is not None:
            self.engine.cancel(entry.job)
            return
        entry.is_aborted = True  # its images may be on their way
        if entry.admitted is not None and not entry.admitted.done():
            entry.admitted.set_result(False)

    def abort_all(self) -> None:
        for rid in list(self._entries):
            self.abort(rid)

    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of running and waiting requests, and the tokens that the running ones occupy."""
        running = [e for e in self._entries.values() if e.job is not None and e.job.samples]
        tokens = sum(len(e.request.input_ids) + len(e.job.samples) for e in running if e.job is not None)
        return len(running), len(self._entries) - len(running), tokens

    # --------------------------------------------------------------------------------------------------- gate

    @property
    def _is_open(self) -> bool:
        is_replacing = self._session is not None and self._session.staged is None
        return not (self.is_paused or is_replacing or self._is_released or self._holds)

    def _open_if_free(self) -> None:
        if not self._is_open:
            return
        for entry in self._entries.values():
            if entry.admitted is not None and not entry.admitted.done():
                entry.admitted.set_result(True)

    def pause(self) -> None:
        """Shut the gate and end all requests with the tokens sampled so far (mode `abort`)."""
        self.is_paused = True
        self.abort_all()

    def resume(self) -> None:
        self.is_paused = False
        self._open_if_free()

    async def release_memory(self) -> None:
        """Neither sample nor accept weights until `resume_memory`. On a GPU, free weights and cache.

        Raises:
            WrongState: requests are running, or the memory is already released.
        """
        if self._is_released or not (self.is_paused or self._idle.is_set()):
            raise WrongState(
                "release_memory_occupation should be called only when the server is idle, and once: pause it "
                "before"
            )
        self._is_released = True  # before the first await, so that no request starts meanwhile
        await self._idle.wait()
        async with self._update_lock:
            self._lent = await self.engine.lend_memory()

    async def resume_memory(self) -> None:
        """Undo `release_memory`: the weights are as before, and the cache is empty.

        Raises:
            WrongState: the memory was not released.
        """
        if not self._is_released:
            raise WrongState("resume_memory_occupation came without release_memory_occupation before")
        async with self._update_lock:
            if self._lent is not None:
                await self.engine.while_parked(self._lent.take_back)
            self._lent = None
            self._is_released = False
        self._open_if_free()

    def _check_not_lent(self) -> None:
        if self._lent is not None:
            raise WrongState(_RELEASED)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Return whether nothing runs, after waiting for that up to `timeout_s`."""
        if timeout_s > 0 and not self._idle.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout_s)
        return self._idle.is_set()

    @asynccontextmanager
    async def _exclusive(self, *, abort_all: bool) -> AsyncIterator[None]:
        """Run one update at a time, with the gate shut and no request running.

        The gate is shut before the wait for idle; otherwise new requests could delay an update forever.
        """
        async with self._update_lock:
            if self._is_released:
                raise WrongState(_RELEASED)
            self._holds += 1
            try:
                if abort_all:
                    self.abort_all()
                await self._idle.wait()
                yield
            finally:
                self._holds -= 1
                self._open_if_free()

    # ------------------------------------------------------------------------------------------------ updates

    async def update_from_disk(self, folder: str, *, version: str | None, abort_all: bool) -> None:
        """Replace all weights by the checkpoint in `folder`.

        Raises:
            WeightsRefused: they do not fit the model, or their forward is not finite; the old weights are
                kept.
            WrongState: the memory is released.
        """
        # Read before the gate shuts: sampling is blocked only while the tensors are copied.
        async with self._disk_lock:
            tensors = await in_thread(partial(self._weights.read_folder, folder))
            name = await in_thread(partial(name_of, folder))
            async with self._exclusive(abort_all=abort_all):
                await self._check(await self.engine.while_parked(partial(self._weights.replace, tensors)))
                self.model_path = folder
                self._weights_name = name
                if version is not None:
                    self.rename(version)

    async def update_from_changes(self, folder: str, *, version: str | None, abort_all: bool) -> None:
        """Apply a folder of changes to the current weights.

        Raises:
            WeightsRefused: the changes have another base, do not fit the model, or their forward is not
                finite; the old weights are kept.
            WrongState: the memory is released.
        """
        async with self._disk_lock:
            changes = await in_thread(partial(self._weights.read_changes, folder))
            async with self._exclusive(abort_all=abort_all):
                if changes.base != self._weights_name:
                    raise WeightsRefused(
                        f"{folder} changes weights called {changes.base!r}; this server has "
                        f"{self._weights_name!r}"
                    )
                await self._check(await self.engine.while_parked(partial(self._weights.change, changes)))
                self._weights_name = changes.name
                if version is not None:
                    self.rename(version)

    async def begin_update(self, *, is_staged: bool = False) -> None:
        """Open a session of distributed updates; the gate stays shut until `end_update`.

        An open session is continued.

        Args:
            is_staged: keep the gate open. The weights are kept beside those in use, and replace them in
                `end_update`. Weights of an earlier staged session that did not end are dropped.

        Raises:
            WrongState: a staged session cannot begin, because another one may have replaced some weights.
        """
        if is_staged:
            if self._session is not None and self._session.staged is None:
                raise WrongState("a session of updates that are not staged is open; end it first")
            self._session = _Session(self.version, staged={})
            return
        if self._session is None or self._session.staged is not None:
            self._session = _Session(self.version)
        async with self._exclusive(abort_all=False):
            pass

    async def end_update(self) -> None:
        """Close the session, if one is open.

        Raises:
            WeightsRefused: one of its updates had not ended, or the forward of the new weights is not finite.
                The weights and the version from before the session are restored.
        """
        self._check_not_lent()
        session, self._session = self._session, None
        # The session is closed for its updates from here on, but the gate stays shut until the weights are
        # checked.
        self._holds += 1
        try:
            if session is not None:
                await self._close(session)
        finally:
            self._holds -= 1
            self._open_if_free()

    async def _close(self, session: _Session) -> None:
        if session.num_coming:  # do not take the lock: the pending update holds it, and may hang for long
            await self.engine.while_parked(session.undo.restore)
            self.rename(session.version)
            raise WeightsRefused(
                "the session ended while weights of it were on their way; the old weights are kept"
            )
        if session.staged is not None:
            await self._put_staged(session.staged, session.next_version)
            return
        async with self._update_lock:
            try:
                await self._check(session.undo)
            except WeightsRefused:
                self.rename(session.version)
                raise

    async def _put_staged(self, staged: Mapping[str, Tensor], version: str | None) -> None:
        if staged and version is None:
            raise WeightsRefused(
                "the session ended before the update with the version came; the old weights are kept"
            )
        async with self._exclusive(abort_all=False):
            await self._check(await self.engine.while_parked(partial(self._weights.replace, staged)))
            self._weights_name = None
            if version is not None:
                self.rename(version)

    async def update_from_group(
        self, specs: Sequence[WeightSpec], *, name: str, is_bucket: bool, version: str | None, abort_all: bool
    ) -> None:
        """Receive weights from rank 0 of the group `name`, within a session.

        Raises:
            WrongState: no session is open, it ended meanwhile, or the group was not joined.
            WeightsRefused: the weights do not fit the model.
            InfrastructureError: the broadcast failed.
        """
        session = self._session
        if session is None:
            raise WrongState(
                "update_weights_from_distributed must run between begin_weight_update() and "
                "end_weight_update()"
            )
        group = self.groups.get(name)
        session.num_coming += 1
        try:
            if session.staged is not None:
                async with self._update_lock:
                    tensors = await in_thread(
                        partial(self._weights.receive, specs, group, is_bucket=is_bucket)
                    )
                if self._session is not session:
                    raise WrongState("the session of this update ended while its weights were on their way")
                # Into the host's memory: beside a model, a GPU has no room for a second one.
                session.staged |= {name: tensor.cpu() for name, tensor in tensors.items()}
                session.next_version = version
                return
            async with self._exclusive(abort_all=abort_all):
                tensors = await in_thread(partial(self._weights.receive, specs, group, is_bucket=is_bucket))
                self._weights_name = None
                # The session may end during either await. If it ends during the receive, nothing is replaced;
                # if it ends during the replacement, the old weights are restored below.
                if self._session is session:
                    session.undo.extend(
                        await self.engine.while_parked(partial(self._weights.replace, tensors))
                    )
                if self._session is not session:
                    await self.engine.while_parked(session.undo.restore)
                    raise WrongState(
                        "the session of this update ended while its weights were on their way; the old "
                        "weights are kept"
                    )
                if version is not None:
                    self.rename(version)
        finally:
            session.num_coming -= 1

    async def _check(self, undo: Undo) -> None:
        """Run a short forward on the changed weights, without and with each adapter; roll back if not finite.

        Raises:
            WeightsRefused: the forward is not finite; the old weights are restored.
        """
        if not undo.is_needed:
            return
        for adapter in (None, *self.adapters):
            if not await self.engine.computes(adapter):
                await self.engine.while_parked(undo.restore)
                raise WeightsRefused(
                    "a forward of these weights is not finite, so that nothing could be sampled; the old "
                    "weights are kept"
                )

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load the LoRA adapter of `folder`; raise WrongState or WeightsRefused, with nothing changed."""
        async with self._disk_lock:
            adapter = await in_thread(partial(self.engine.adapters.read, folder))
            async with self._exclusive(abort_all=False):
                if name in self.adapters:
                    raise WrongState(f"LoRA adapter {shown(name)} is loaded already; unload it first")
                if len(self.adapters) == MAX_ADAPTERS:
                    raise WrongState(
                        f"the embedded server holds at most {MAX_ADAPTERS} LoRA adapters; "
                        f"{self._loaded_text()}, unload one first"
                    )
                await self.engine.while_parked(partial(self.engine.adapters.put, name, adapter))
                if not await self.engine.computes(name):
                    await self.engine.while_parked(partial(self.engine.adapters.remove, name))
                    raise WeightsRefused(
                        "a forward with this adapter is not finite, so that nothing could be sampled; it is "
                        "not loaded"
                    )
                self.adapters[name] = LoadedAdapter(folder, adapter)

    async def unload_adapter(self, name: str) -> None:
        """Unload the adapter once nothing runs; raise WrongState if no adapter has this name."""
        async with self._exclusive(abort_all=False):
            if name not in self.adapters:
                raise WrongState(f"no LoRA adapter {shown(name)} is loaded; {self._loaded_text()}")
            await self.engine.while_parked(partial(self.engine.adapters.remove, name))
            del self.adapters[name]

    async def checksums(self) -> dict[str, str]:
        """Return {name: sha256} of all weights; tensors of an adapter are named `adapter/tensor`."""
        async with self._update_lock:
            self._check_not_lent()
            found = await in_thread(self._weights.checksums)
            for adapter, loaded in self.adapters.items():
                own = await in_thread(loaded.adapter.checksums)
                found |= {adapter_tensor(adapter, name): value for name, value in own.items()}
            return found

    def rename(self, version: str) -> None:
        """Set the version of the weights; tokens sampled from here on carry it."""
        self.version = version
        for entry in self._entries.values():
            if entry.job is not None:
                entry.starts.append((version, len(entry.job.samples)))

    async def leave_group(self, name: str) -> None:
        """Leave a process group once no update uses it; raise WrongState if no group has this name."""
        async with self._update_lock:
            await self.groups.leave(name)


def _spans(starts: Sequence[tuple[str, int]], num_tokens: int) -> list[VersionSpan]:
    ends = [*(start for _, start in starts), num_tokens][1:]
    return [
        VersionSpan(version, start, end)
        for (version, start), end in zip(starts, ends, strict=True)
        if end > start
    ]


def _experts(entry: _Entry, num_samples: int) -> NDArray[np.int16] | None:
    """Return the experts that a request asks for; None if it does not, or if not all are known."""
    request, job = entry.request, entry.job
    if request.experts_from is None or job is None or job.experts is None:
        return None
    return job.experts.between(request.experts_from, len(request.input_ids) + num_samples - 1)
