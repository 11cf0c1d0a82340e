"""What the server does with requests between HTTP and the engine: admission, pausing, aborting, updates, versions.

Every request passes a gate. The gate is shut while the server is paused and while weights are replaced; requests that come then
wait. Weights change only when nothing runs, so all tokens of a request have one version unless the version is merely renamed.
Lives on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from torch import Tensor
from torch.distributed import ProcessGroup

from agentrl.serving.embedded.adapter import Adapter
from agentrl.serving.embedded.engine import Engine, Job
from agentrl.serving.embedded.requests import BadRequest, GenerateRequest
from agentrl.serving.embedded.weights import Weights, WeightSpec, WeightsRefused, name_of
from agentrl.sglang.process_group import join_weights_group, leave_weights_group
from agentrl.sglang.protocol import adapter_tensor

GROUP_TIMEOUT_S = 300.0
"""A weights group that does not form, or a broadcast that does not come, by then failed."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of an output were sampled under `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Result:
    """One answered request; `message` only with "abort", `matched` only with "stop"."""

    request: GenerateRequest
    samples: Sequence[tuple[int, float]]  # (token, logprob)
    spans: Sequence[VersionSpan]
    version: str
    finish: Literal["stop", "length", "abort"]
    seconds: float
    matched: int | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """The adapter that requests may name."""

    name: str
    folder: str
    adapter: Adapter


@dataclass(eq=False)
class _Entry:
    """One request from arrival to answer: waiting while `job` is None. `starts` are (version, index of its first token)."""

    request: GenerateRequest
    arrived: float
    admitted: asyncio.Future[bool] | None = None
    job: Job | None = None
    starts: list[tuple[str, int]] = field(default_factory=list)


class WrongState(Exception):
    """A call came at a moment at which it has no meaning: an update outside of a session, a group that does not exist."""


class Service:
    """The state of one server. `version` is what SGLang calls weight_version."""

    def __init__(self, engine: Engine, weights: Weights, *, model_path: str, version: str) -> None:
        self.engine = engine
        self.model_path = model_path
        self.version = version
        self.is_paused = False
        self.is_warm = False
        self.adapter: LoadedAdapter | None = None
        self._weights = weights
        self._weights_name: str | None = None  # known of weights that the learner named
        self._entries: dict[str, _Entry] = {}
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._holds = 0  # updates that shut the gate
        self._is_session = False
        self._is_released = False
        self._update_lock = asyncio.Lock()
        self._groups: dict[str, ProcessGroup] = {}

    # ---------------------------------------------------------------------------------------------------- requests

    def check_rids(self, requests: Sequence[GenerateRequest]) -> None:
        for request in requests:
            if request.rid in self._entries:
                raise BadRequest(f"Duplicate request ID detected: {request.rid}")

    async def generate(self, request: GenerateRequest) -> Result:
        """Sample one continuation. Cancelling it takes the request out of the engine.

        Raises:
            BadRequest: a request with this rid is under way, or no adapter of its name is loaded when it is admitted.
            EngineError: the engine ended.
        """
        self.check_rids([request])
        entry = _Entry(request, time.monotonic())
        self._entries[request.rid] = entry
        try:
            was_admitted = await self._admit(entry)
            if was_admitted and request.max_new_tokens > 0:
                await self._run(entry)
            return self._result(entry, was_admitted=was_admitted)
        finally:
            del self._entries[request.rid]

    async def _admit(self, entry: _Entry) -> bool:
        """Wait for the gate; False when the request was aborted before it opened."""
        while not self._is_open:
            entry.admitted = asyncio.get_running_loop().create_future()
            if not await entry.admitted:
                return False
        return True

    async def _run(self, entry: _Entry) -> None:
        request = entry.request
        self._check_adapter(request)  # behind the gate: a request that waited for a publish takes what that brought
        job = self.engine.submit(
            request.input_ids,
            max_new_tokens=request.max_new_tokens,
            stop_ids=request.stop_ids,
            sampling=request.sampling,
            sees_adapter=request.adapter is not None,
        )
        entry.job = job
        entry.starts = [(self.version, 0)]
        self._num_running += 1
        self._idle.clear()
        try:
            await job.finished
        finally:
            self.engine.cancel(job)
            self._num_running -= 1
            if self._num_running == 0:
                self._idle.set()

    def _check_adapter(self, request: GenerateRequest) -> None:
        if request.adapter is not None and (self.adapter is None or self.adapter.name != request.adapter):
            raise BadRequest(f"no LoRA adapter {request.adapter!r} is loaded; {self._loaded_text()}")

    def _loaded_text(self) -> str:
        return f"loaded: {self.adapter.name!r}" if self.adapter is not None else "none is"

    def _result(self, entry: _Entry, *, was_admitted: bool) -> Result:
        request = entry.request
        samples = list(entry.job.samples) if entry.job else []
        last = samples[-1][0] if samples else None
        result = partial(
            Result, request, samples, _spans(entry.starts, len(samples)), self.version, seconds=time.monotonic() - entry.arrived
        )
        if not was_admitted:
            return result(finish="abort", message="Abort in waiting queue")
        if last in request.stop_ids:
            return result(finish="stop", matched=last)
        if len(samples) >= request.max_new_tokens:
            return result(finish="length")
        return result(finish="abort", message="Aborted")

    def abort(self, rid: str) -> None:
        """End one request with what it has; an unknown rid is no error."""
        entry = self._entries.get(rid)
        if entry is None:
            return
        if entry.job is not None:
            self.engine.cancel(entry.job)
        elif entry.admitted is not None and not entry.admitted.done():
            entry.admitted.set_result(False)

    def abort_all(self) -> None:
        for rid in list(self._entries):
            self.abort(rid)

    def counts(self) -> tuple[int, int, int]:
        """Return requests running, requests waiting, and tokens of the running ones."""
        running = [e for e in self._entries.values() if e.job is not None and e.job.samples]
        tokens = sum(len(e.request.input_ids) + len(e.job.samples) for e in running if e.job is not None)
        return len(running), len(self._entries) - len(running), tokens

    # -------------------------------------------------------------------------------------------------------- gate

    @property
    def _is_open(self) -> bool:
        return not (self.is_paused or self._is_session or self._is_released or self._holds)

    def _open_if_free(self) -> None:
        if not self._is_open:
            return
        for entry in self._entries.values():
            if entry.admitted is not None and not entry.admitted.done():
                entry.admitted.set_result(True)

    def pause(self) -> None:
        """Shut the gate and end all requests under way with what they have (mode `abort`)."""
        self.is_paused = True
        self.abort_all()

    def resume(self) -> None:
        self.is_paused = False
        self._open_if_free()

    async def release_memory(self) -> None:
        """Sample nothing and take no weights until `resume_memory`. On a CPU nothing is gained by giving the memory itself back.

        Raises:
            WrongState: requests run, or it is released.
        """
        if self._is_released or not (self.is_paused or self._idle.is_set()):
            raise WrongState("release_memory_occupation should be called only when the server is idle, and once: pause it before")
        self._is_released = True  # shuts the gate before anything is awaited
        await self._idle.wait()

    def resume_memory(self) -> None:
        """Raise WrongState when the memory was not released."""
        if not self._is_released:
            raise WrongState("resume_memory_occupation came without release_memory_occupation before")
        self._is_released = False
        self._open_if_free()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Tell whether nothing runs, waiting up to `timeout_s` for it."""
        if timeout_s > 0 and not self._idle.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout_s)
        return self._idle.is_set()

    @asynccontextmanager
    async def _exclusive(self, *, abort_all: bool) -> AsyncIterator[None]:
        """One update at a time, with the gate shut and nothing running."""
        async with self._update_lock:
            if self._is_released:
                raise WrongState("the memory of the weights is released; call resume_memory_occupation before an update")
            self._holds += 1
            try:
                if abort_all:
                    self.abort_all()
                await self._idle.wait()
                yield
            finally:
                self._holds -= 1
                self._open_if_free()

    # ----------------------------------------------------------------------------------------------------- updates

    async def update_from_disk(self, folder: str, *, version: str | None, abort_all: bool) -> None:
        """Replace all weights by those of `folder`; raise WeightsRefused, with nothing changed, when they do not fit."""
        # Read before the gate shuts: the server stands still only while the tensors are copied.
        tensors = await asyncio.to_thread(self._weights.read_folder, folder)
        async with self._exclusive(abort_all=abort_all):
            await self._replace(tensors, version)
            self.model_path = folder
            self._weights_name = name_of(folder)

    async def update_from_changes(self, folder: str, *, version: str | None, abort_all: bool) -> None:
        """Change the weights by a folder of changes; raise WeightsRefused, with nothing changed, when it stands on other weights."""
        changes = await asyncio.to_thread(self._weights.read_changes, folder)
        async with self._exclusive(abort_all=abort_all):
            if changes.base != self._weights_name:
                raise WeightsRefused(f"{folder} changes weights called {changes.base!r}; this server has {self._weights_name!r}")
            await asyncio.to_thread(self._while_parked, partial(self._weights.change, changes))
            self._weights_name = changes.name
            if version is not None:
                self.rename(version)

    async def begin_update(self) -> None:
        """Open a session of distributed updates: the gate stays shut until `end_update`. Again within one: start over."""
        self._is_session = True
        async with self._exclusive(abort_all=False):
            pass

    def end_update(self) -> None:
        self._is_session = False
        self._open_if_free()

    async def update_from_group(
        self, specs: Sequence[WeightSpec], *, name: str, is_bucket: bool, version: str | None, abort_all: bool
    ) -> None:
        """Receive weights from rank 0 of the group `name`; raise WrongState, WeightsRefused or InfrastructureError."""
        if not self._is_session:
            raise WrongState("update_weights_from_distributed must run between begin_weight_update() and end_weight_update()")
        group = self._groups.get(name)
        if group is None:
            raise WrongState(
                f"Failed to receive weights: Group {name} not in {sorted(self._groups)}. Please call `init_weights_update_group` first."
            )
        async with self._exclusive(abort_all=abort_all):
            await self._replace(await asyncio.to_thread(self._weights.receive, specs, group, is_bucket=is_bucket), version)

    async def _replace(self, tensors: Mapping[str, Tensor], version: str | None) -> None:
        self._weights_name = None
        await asyncio.to_thread(self._while_parked, partial(self._weights.replace, tensors))
        if version is not None:
            self.rename(version)

    async def load_adapter(self, name: str, folder: str) -> None:
        """Put the LoRA adapter of `folder` beside the weights; raise WrongState or WeightsRefused, with nothing changed."""
        adapter = await asyncio.to_thread(self.engine.adapter_slot.read, folder)
        async with self._exclusive(abort_all=False):
            if self.adapter is not None:
                raise WrongState(f"the embedded server holds one LoRA adapter at a time; {self._loaded_text()}, unload it first")
            await asyncio.to_thread(self._while_parked, partial(self.engine.adapter_slot.put, adapter))
            self.adapter = LoadedAdapter(name, folder, adapter)

    async def unload_adapter(self, name: str) -> None:
        """Take the LoRA adapter away when nothing runs any more; raise WrongState when there is none so called."""
        async with self._exclusive(abort_all=False):
            if self.adapter is None or self.adapter.name != name:
                raise WrongState(f"no LoRA adapter {name!r} is loaded; {self._loaded_text()}")
            await asyncio.to_thread(self._while_parked, partial(self.engine.adapter_slot.put, None))
            self.adapter = None

    async def checksums(self) -> dict[str, str]:
        """Return {name: sha256} of all weights, and of the tensors of the adapter behind its name and a slash."""
        async with self._update_lock:
            found = await asyncio.to_thread(self._weights.checksums)
            if self.adapter is not None:
                own = await asyncio.to_thread(self.adapter.adapter.checksums)
                found |= {adapter_tensor(self.adapter.name, name): value for name, value in own.items()}
            return found

    def _while_parked(self, action: Callable[[], None]) -> None:
        # Nothing runs, but a request cancelled a moment ago may be in a last forward.
        with self.engine.parked():
            action()

    def rename(self, version: str) -> None:
        """Give the weights a version; tokens sampled from here on carry it."""
        self.version = version
        for entry in self._entries.values():
            if entry.job is not None:
                entry.starts.append((version, len(entry.job.samples)))

    # ------------------------------------------------------------------------------------------------------ groups

    async def join_group(self, *, address: str, port: int, rank: int, world_size: int, name: str, backend: str) -> None:
        """Join a process group; generation goes on meanwhile. Raise InfrastructureError when it does not form."""
        if name in self._groups:
            raise WrongState(f"The group {name} exists already; destroy it first.")
        join = partial(
            join_weights_group,
            address=address,
            port=port,
            rank=rank,
            world_size=world_size,
            name=name,
            backend=backend,
            timeout_s=GROUP_TIMEOUT_S,
        )
        self._groups[name] = await asyncio.to_thread(join)

    async def leave_group(self, name: str) -> None:
        group = self._groups.pop(name, None)
        if group is None:
            raise WrongState("The group to be destroyed does not exist.")
        async with self._update_lock:
            await asyncio.to_thread(leave_weights_group, group)


def _spans(starts: Sequence[tuple[str, int]], num_tokens: int) -> list[VersionSpan]:
    ends = [*(start for _, start in starts), num_tokens][1:]
    return [VersionSpan(version, start, end) for (version, start), end in zip(starts, ends, strict=True) if end > start]
