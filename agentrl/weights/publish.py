"""Publish a version: pause the servers, send the weights, resume. After it, every next token carries the version.

What is sent are all weights, adapters merged into them, or a LoRA adapter alone (`rollout.weights.adapter`).

A publish is all or nothing per server: a server that fails is returned in `PublishReport.failed` (paused, or dead) and must not
take traffic until `publish` reached it; the router holds it back, because its version stays behind.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import trio

from agentrl.config.rollout import WeightsConfig
from agentrl.errors import InfrastructureError, RequestRefused, ServerError
from agentrl.sglang.client import SGLangClient
from agentrl.sglang.protocol import POLICY_ADAPTER, adapter_tensor
from agentrl.types import TensorSpec
from agentrl.weights.plan import plan_buckets

PauseMode = Literal["abort", "retract", "in_place"]
T = TypeVar("T")


class WeightSource(Protocol):
    """Who holds the weights: the learner. All calls block, and run in worker threads here."""

    def export(self, folder: str) -> None: ...

    def export_adapter(self, folder: str) -> None: ...

    def tensor_specs(self) -> Sequence[TensorSpec]: ...

    def adapter_specs(self) -> Sequence[TensorSpec]: ...

    def open_rendezvous(self) -> tuple[str, int]:
        """Return a free (address, port) of the host of rank 0, reachable by the servers."""

    def join_weights_group(self, address: str, port: int, world_size: int, name: str, backend: str) -> None: ...

    def send_bucket(self, names: Sequence[str]) -> None: ...

    def leave_weights_group(self) -> None: ...

    def checksums(self) -> Mapping[str, str]: ...

    def adapter_checksums(self) -> Mapping[str, str]: ...


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What one publish took and whom it did not reach (url -> one line of why)."""

    version: int
    seconds: float
    num_bytes: int
    failed: Mapping[str, str] = field(default_factory=dict)


class Publisher:
    """Publishes versions of one learner to a changing set of servers, by one transport.

    The process group of the `distributed` transport is kept open between publishes and made anew when the set of servers
    changed or a publish failed.
    """

    def __init__(self, source: WeightSource, config: WeightsConfig, *, folder: Path, pause_mode: PauseMode, backend: str) -> None:
        self._source = source
        self._config = config
        self._folder = folder
        self._pause_mode = pause_mode
        self._backend = backend
        self._group: tuple[str, ...] = ()  # urls in the open process group, in rank order
        self._num_groups = 0

    async def publish(self, version: int, servers: Sequence[SGLangClient]) -> PublishReport:
        """Bring `servers` to `version`; those that could not be brought there are in the report.

        Raises:
            InfrastructureError: the learner's side failed: no server can be trusted to have the version.
        """
        started = time.monotonic()
        failed: dict[str, str] = {}
        specs = await _in_thread(self._source.adapter_specs if self._is_alone else self._source.tensor_specs)
        with trio.move_on_after(self._config.timeout_s) as scope:
            if self._is_alone:
                await self._adapter_by_disk(version, servers, failed)
            elif self._config.transport == "disk":
                await self._by_disk(version, servers, failed)
            else:
                await self._by_group(version, servers, specs, failed)
            if self._config.verify:
                await self._verify([s for s in servers if s.url not in failed], failed)
        if scope.cancelled_caught:
            raise InfrastructureError(f"publish of version {version} took longer than rollout.weights.timeout_s={self._config.timeout_s:g}")
        return PublishReport(version, time.monotonic() - started, sum(s.num_bytes for s in specs) * len(servers), failed)

    # ------------------------------------------------------------------------------------------------------- disk

    async def _by_disk(self, version: int, servers: Sequence[SGLangClient], failed: dict[str, str]) -> None:
        # The folder is written before anything pauses, so that servers stand still only while they read it.
        folder = self._folder / f"v{version:06d}"
        await _in_thread(partial(self._source.export, str(folder)))

        async def send(server: SGLangClient) -> None:
            async with _paused(server, self._pause_mode):
                await server.update_weights_from_disk(str(folder), version=version, flush_cache=self._flush)

        await _for_each(servers, send, failed)
        _keep_newest(self._folder, keep=2)

    async def _adapter_by_disk(self, version: int, servers: Sequence[SGLangClient], failed: dict[str, str]) -> None:
        """Put the adapter of `version` in the place of the last one; the base weights stay as the servers were started with."""
        folder = self._folder / f"v{version:06d}"
        await _in_thread(partial(self._source.export_adapter, str(folder)))

        async def send(server: SGLangClient) -> None:
            # Aborted, because a server gives up an adapter only when no request runs with it, and so that none runs with two.
            async with _paused(server, "abort"):
                with suppress(RequestRefused):  # it has none before its first publish
                    await server.unload_adapter(POLICY_ADAPTER)
                await server.load_adapter(POLICY_ADAPTER, str(folder))
                await server.update_weight_version(version)

        await _for_each(servers, send, failed)
        _keep_newest(self._folder, keep=2)

    # -------------------------------------------------------------------------------------------------- distributed

    async def _by_group(self, version: int, servers: Sequence[SGLangClient], specs: Sequence[TensorSpec], failed: dict[str, str]) -> None:
        buckets = plan_buckets(specs, max_bytes=self._config.bucket_bytes)
        try:
            await self._ensure_group(servers)
            async with trio.open_nursery() as nursery:
                for server in servers:
                    nursery.start_soon(self._receive, server, buckets, version)
                nursery.start_soon(self._send, buckets)
        except* (ServerError, InfrastructureError) as errors:
            # One lost peer breaks the group for all: no server can be trusted to have received every bucket.
            await self.close()
            why = "; ".join(str(e) for e in _flatten(errors))
            failed.update({server.url: why for server in servers})

    async def _receive(self, server: SGLangClient, buckets: Sequence[Sequence[TensorSpec]], version: int) -> None:
        async with _paused(server, self._pause_mode):
            await server.begin_weight_update()
            for index, bucket in enumerate(buckets):
                is_last = index == len(buckets) - 1
                await server.update_weights_from_distributed(
                    bucket, group=self._group_name, version=version if is_last else None, flush_cache=self._flush and is_last
                )
            await server.end_weight_update()

    async def _send(self, buckets: Sequence[Sequence[TensorSpec]]) -> None:
        for bucket in buckets:
            await _in_thread(partial(self._source.send_bucket, [spec.name for spec in bucket]))

    async def _ensure_group(self, servers: Sequence[SGLangClient]) -> None:
        urls = tuple(server.url for server in servers)
        if urls == self._group:
            return
        await self.close(servers)
        self._group = urls  # from here on there is something to leave, also when forming the group fails half-way
        self._num_groups += 1
        address, port = await _in_thread(self._source.open_rendezvous)
        world_size = len(servers) + 1
        async with trio.open_nursery() as nursery:
            for rank, server in enumerate(servers, start=1):
                nursery.start_soon(
                    partial(
                        server.init_weights_group,
                        address=address,
                        port=port,
                        rank_offset=rank,
                        world_size=world_size,
                        name=self._group_name,
                        backend=self._backend,
                    )
                )
            join = partial(self._source.join_weights_group, address, port, world_size, self._group_name, self._backend)
            nursery.start_soon(_in_thread, join)

    @property
    def _group_name(self) -> str:
        # A name is used once: a server that was not among those of the last publish may still hold its last group.
        return f"agentrl_weights_{self._num_groups}"

    async def close(self, servers: Sequence[SGLangClient] = ()) -> None:
        """Leave the process group, and make those of `servers` that were in it leave too."""
        if not self._group:
            return
        await _in_thread(self._source.leave_weights_group)
        for server in servers:
            if server.url in self._group:
                try:
                    await server.destroy_weights_group(self._group_name)
                except ServerError:
                    continue  # a restarted server has no group to destroy
        self._group = ()

    # ------------------------------------------------------------------------------------------------------ checks

    @property
    def _is_alone(self) -> bool:
        return self._config.adapter == "alone"

    @property
    def _flush(self) -> bool:
        # SGLang answers 400 to a flush while requests are held in place; their KV cache stays stale by design.
        return self._pause_mode != "in_place"

    async def _verify(self, servers: Sequence[SGLangClient], failed: dict[str, str]) -> None:
        expected = await _in_thread(self._expected_checksums)

        async def check(server: SGLangClient) -> None:
            got = await server.checksums()
            wrong = sorted(name for name in expected if name in got and got[name] != expected[name])
            missing = sorted(set(expected) - set(got))
            if wrong or missing:
                raise ServerError(
                    f"{server.url}: {len(wrong)} tensors differ and {len(missing)} are missing, first: {(wrong + missing)[0]}"
                )

        await _for_each(servers, check, failed)

    def _expected_checksums(self) -> Mapping[str, str]:
        if not self._is_alone:
            return self._source.checksums()
        return {adapter_tensor(POLICY_ADAPTER, name): value for name, value in self._source.adapter_checksums().items()}


@asynccontextmanager
async def _paused(server: SGLangClient, mode: PauseMode) -> AsyncIterator[None]:
    """Hold `server` during an update.

    One whose update failed stays paused: its weights may be half old, half new, under the old version.
    """
    await server.pause(mode)
    yield
    await server.resume()


async def _for_each(servers: Sequence[SGLangClient], action: Callable[[SGLangClient], Awaitable[None]], failed: dict[str, str]) -> None:
    """Run `action(server)` on all side by side; a ServerError of one is its own entry in `failed`."""

    async def one(server: SGLangClient) -> None:
        try:
            await action(server)
        except ServerError as error:
            failed[server.url] = str(error)

    async with trio.open_nursery() as nursery:
        for server in servers:
            nursery.start_soon(one, server)


async def _in_thread(function: Callable[[], T]) -> T:
    return await trio.to_thread.run_sync(function, abandon_on_cancel=True)


def _flatten(group: BaseExceptionGroup) -> list[BaseException]:
    return [leaf for e in group.exceptions for leaf in (_flatten(e) if isinstance(e, BaseExceptionGroup) else [e])]


def _keep_newest(folder: Path, *, keep: int) -> None:
    """Remove all but the newest exported versions; a server may still be reading the one before the last."""
    for old in sorted(folder.glob("v*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
