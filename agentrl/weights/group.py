"""Transport `distributed`: weights travel in buckets through one process group of the learner and all servers.

While a bucket travels, the learner gathers the next one; the servers receive side by side. The learner is rank 0. Every process of a
server that holds a part of the model joins with a rank of its own, so a server takes as many ranks in a row as it has such processes.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

import trio

from agentrl.config.rollout import WeightsConfig
from agentrl.errors import InfrastructureError, LearnerError, RequestRefused, ServerError
from agentrl.sglang.client import SGLangClient
from agentrl.sglang.protocol import parse_num_ranks
from agentrl.types import SendTimes, TensorSpec
from agentrl.weights.attempt import PING_S, Hold, LearnerCalls, Sent, for_each
from agentrl.weights.plan import plan_buckets


class GroupTransport:
    """The process group is kept between publishes, and formed anew when the servers changed or an attempt failed."""

    def __init__(self, learner: LearnerCalls, config: WeightsConfig, *, backend: str) -> None:
        self._learner = learner
        self._source = learner.source
        self._config = config
        self._backend = backend
        self._group: tuple[str, ...] = ()  # urls in the open process group, in rank order
        self._num_groups = 0
        self._name = uuid.uuid4().hex[:8]
        self._clients: dict[str, SGLangClient] = {}  # of the publish under way
        self._buckets: list[list[TensorSpec]] = []

    async def prepare(self, version: int) -> None:
        self._clients = {}
        self._buckets = plan_buckets(await self._learner.call(self._source.tensor_specs), max_bytes=self._config.bucket_bytes)

    async def send(self, version: int, servers: Sequence[SGLangClient], hold: Hold) -> Sent:
        self._clients |= {server.url: server for server in servers}
        num_bytes = sum(spec.num_bytes for bucket in self._buckets for spec in bucket) * len(servers)
        failed = await self._ensure_group(servers)
        if failed:
            return Sent(0, failed)
        times: list[SendTimes] = []
        broken: list[str] = []

        async def receive(server: SGLangClient) -> None:
            async with hold(server) as may_flush:
                await self._receive(server, version, may_flush=may_flush)

        async def receive_all() -> None:
            failed.update(await for_each(servers, receive, timeout_s=self._config.timeout_s, limit="rollout.weights.timeout_s"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive_all)
            nursery.start_soon(self._send, times, broken)
        if failed or broken:
            await self.close(servers)
        # A server that received every bucket has the weights, whatever became of the others.
        return Sent(num_bytes, {url: "; ".join([why, *broken]) for url, why in failed.items()}, times[0] if times else None)

    async def _receive(self, server: SGLangClient, version: int, *, may_flush: bool) -> None:
        with suppress(RequestRefused):  # a session is open only where an attempt broke off
            await server.end_weight_update()
        await server.begin_weight_update()
        for index, bucket in enumerate(self._buckets):
            is_last = index == len(self._buckets) - 1
            await server.update_weights_from_distributed(
                bucket, group=self._group_name, version=version if is_last else None, flush_cache=may_flush and is_last
            )
        await server.end_weight_update()

    async def _send(self, times: list[SendTimes], broken: list[str]) -> None:
        """Send the buckets; when a peer is lost, close the group, which ends the waiting of the others for what will not come."""
        try:
            for bucket in self._buckets:
                await self._learner.call(self._source.send_bucket, [spec.name for spec in bucket])
            times.append(await self._learner.call(self._source.finish_buckets))
        except LearnerError:
            raise  # a rank of the learner is lost, and with it the weights
        except InfrastructureError as error:
            broken.append(str(error))
            await self._learner.call(self._source.leave_weights_group)

    # -------------------------------------------------------------------------------------------------- the group

    async def _ensure_group(self, servers: Sequence[SGLangClient]) -> dict[str, str]:
        """Have the group of exactly `servers`; return why it could not be formed, for each whom that leaves without weights."""
        urls = tuple(server.url for server in servers)
        if urls == self._group:
            return {}
        await self.close(list(self._clients.values()))
        self._group = urls  # from here on there is something to leave, also when forming the group fails half-way
        self._num_groups += 1
        num_ranks, failed = await self._count_ranks(servers)
        if failed:
            return {url: failed.get(url) or "; ".join(failed.values()) for url in urls}
        address, port = await self._learner.call(self._source.open_rendezvous)
        sizes = [num_ranks[url] for url in urls]
        world_size = 1 + sum(sizes)
        offsets = dict(zip(urls, accumulate(sizes, initial=1), strict=False))  # the last one would be the next server's
        broken: list[str] = []

        async def ask(server: SGLangClient) -> None:
            await server.init_weights_group(
                address=address,
                port=port,
                rank_offset=offsets[server.url],
                world_size=world_size,
                name=self._group_name,
                backend=self._backend,
            )

        async def ask_all() -> None:
            failed.update(await for_each(servers, ask, timeout_s=self._config.timeout_s, limit="rollout.weights.timeout_s"))

        async def join() -> None:
            arguments = (address, port, world_size, self._group_name, self._backend, self._config.timeout_s)
            try:
                await self._learner.call(self._source.join_weights_group, *arguments)
            except LearnerError:
                raise
            except InfrastructureError as error:
                broken.append(str(error))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_all)
            nursery.start_soon(join)
        if not failed and not broken:
            return {}
        await self.close(servers)
        return {url: failed.get(url) or "; ".join([*broken, *failed.values()]) for url in urls}

    async def _count_ranks(self, servers: Sequence[SGLangClient]) -> tuple[dict[str, int], dict[str, str]]:
        """Return how many ranks each server joins with, and why a server's answer is of no use."""
        num_ranks: dict[str, int] = {}

        async def ask(server: SGLangClient) -> None:
            num_ranks[server.url] = parse_num_ranks(await server.server_info(), server=server.url)

        failed = await for_each(servers, ask, timeout_s=PING_S, limit="the time of a question")
        return num_ranks, failed

    @property
    def _group_name(self) -> str:
        # A name is used once: a server that was not among those of the last publish, or of a run before, may still hold its last group.
        return f"agentrl_weights_{self._name}_{self._num_groups}"

    async def close(self, servers: Sequence[SGLangClient] = ()) -> None:
        """Leave the process group, and make those of `servers` that were in it leave too, if they answer."""
        if self._group:
            await self._learner.call(self._source.leave_weights_group)
            await self.abandon(servers)

    async def abandon(self, servers: Sequence[SGLangClient]) -> None:
        """Make those of `servers` that are in the process group leave it, if they answer; the learner has left."""

        async def leave(server: SGLangClient) -> None:
            with suppress(ServerError):  # a restarted server has no group to destroy
                await server.destroy_weights_group(self._group_name)

        await for_each([s for s in servers if s.url in self._group], leave, timeout_s=PING_S, limit="the time of a question")
        self._group = ()
