"""Transport `distributed`: weights are broadcast in buckets, through process groups of a learner rank and all
servers.

Sources, which are learner ranks, take turns: each has a group of its own, in which it is rank 0. While one
bucket is broadcast, the learner gathers the next; the servers receive in parallel. Every process of a server
with a part of the model joins with its own rank, so a server takes as many consecutive ranks as it has such
processes.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path

import trio

from agentrl.config.rollout import WeightsConfig
from agentrl.errors import InfrastructureError, LearnerError, RequestRefused, ServerError
from agentrl.learner.buckets import plan_buckets
from agentrl.learner.learner import Learner
from agentrl.servers.client import SGLangClient, for_each
from agentrl.servers.protocol import parse_num_ranks
from agentrl.types import SendTimes, TensorSpec
from agentrl.weights.transport import PING_S, Hold, LearnerCalls, Sent, Transport, sum_bytes


class GroupTransport(Transport):
    """Keeps its process groups between publishes. Forms them anew if servers change or an attempt fails."""

    def __init__(self, learner: LearnerCalls, config: WeightsConfig, *, folder: Path) -> None:
        super().__init__(learner, config, folder=folder)
        self._members: tuple[str, ...] = ()  # urls in the open process groups, in rank order
        self._num_formed = 0
        self._staging: set[str] = set()  # urls of members that receive weights while they sample
        self._name = uuid.uuid4().hex[:8]
        self._clients: dict[str, SGLangClient] = {}  # of the current publish
        self._buckets: list[list[TensorSpec]] = []

    async def prepare(self, version: int) -> None:
        self._clients = {}
        self._buckets = plan_buckets(await self._tensor_specs(), max_bytes=self._config.bucket_bytes)

    async def send(self, version: int, servers: Sequence[SGLangClient], hold: Hold) -> Sent:
        self._clients |= {server.url: server for server in servers}
        num_bytes = sum_bytes(await self._tensor_specs())
        failed = await self._ensure_groups(servers)
        if failed:
            return Sent(0, failed)
        times: list[SendTimes] = []
        broken: list[str] = []

        async def receive(server: SGLangClient) -> None:
            if server.url in self._staging:
                await server.begin_weight_update(is_staged=True)
                await self._receive(server, version, may_flush=True)
                async with hold(server):
                    await server.end_weight_update()
                return
            async with hold(server) as may_flush:
                with suppress(RequestRefused):  # refused unless an aborted attempt left a session open
                    await server.end_weight_update()
                await server.begin_weight_update()
                await self._receive(server, version, may_flush=may_flush)
                await server.end_weight_update()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send, times, broken)
            failed = await self._try_each(servers, receive, num_bytes=num_bytes)
        if failed or broken:
            await self.close(servers)
        # A server that received every bucket has the weights, even if other servers failed.
        return Sent(
            num_bytes * len(servers),
            {url: "; ".join([why, *broken]) for url, why in failed.items()},
            times[0] if times else None,
        )

    async def _receive(self, server: SGLangClient, version: int, *, may_flush: bool) -> None:
        for index, bucket in enumerate(self._buckets):
            is_last = index == len(self._buckets) - 1
            await server.update_weights_from_distributed(
                bucket,
                group=self._groups[index % len(self._groups)],
                version=version if is_last else None,
                flush_cache=may_flush and is_last,
            )

    async def _send(self, times: list[SendTimes], broken: list[str]) -> None:
        """Send all buckets by one call of the ranks, which plan the same buckets.

        If a peer is lost, close the groups, so that the others stop waiting for the rest.
        """
        # A call may take as long as two collectives; each bucket is one.
        ranks = self._learner.learner.patient(1 + len(self._buckets) / 2)
        try:
            times.append(
                await self._learner.call(partial(ranks.run, Learner.send_buckets, self._config.bucket_bytes))
            )
        except LearnerError:
            raise  # a learner rank is lost, and no other attempt can succeed
        except InfrastructureError as error:
            broken.append(str(error))
            await self._learner.run(Learner.leave_weights_group)

    # --------------------------------------------------------------------------------------------- the groups

    async def _ensure_groups(self, servers: Sequence[SGLangClient]) -> dict[str, str]:
        """Ensure groups of exactly `servers`; return url -> reason for all of them if this fails."""
        urls = tuple(server.url for server in servers)
        if urls == self._members:
            return {}
        await self.close(list(self._clients.values()))
        self._members = urls  # set before forming the groups: those formed half-way must be left too
        self._num_formed += 1
        self._staging.clear()
        num_ranks, failed = await self._count_ranks(servers)
        if failed:
            return {url: failed.get(url) or "; ".join(failed.values()) for url in urls}
        address, port = await self._learner.call(self._learner.learner.find_address)
        backend: str = self._config.backend
        if backend == "auto":
            backend = await self._learner.run(Learner.collective_backend)
        sizes = [num_ranks[url] for url in urls]
        world_size = 1 + sum(sizes)
        # `accumulate` yields one offset more than there are servers.
        offsets = dict(zip(urls, accumulate(sizes, initial=1), strict=False))
        broken: list[str] = []

        async def ask(server: SGLangClient) -> None:
            for name in self._groups:
                await server.init_weights_group(
                    address=address,
                    port=port,
                    rank_offset=offsets[server.url],
                    world_size=world_size,
                    name=name,
                    backend=backend,
                )

        async def join() -> None:
            try:
                await self._learner.run(
                    Learner.join_weights_groups,
                    address,
                    port,
                    world_size,
                    self._groups,
                    backend,
                    self._pace.allowed_s(max(map(sum_bytes, self._buckets), default=0)),
                )
            except LearnerError:
                raise
            except InfrastructureError as error:
                broken.append(str(error))

        async with trio.open_nursery() as nursery:
            # Concurrently: each side blocks until all ranks have joined.
            nursery.start_soon(join)
            failed = await self._try_each(servers, ask, num_bytes=0)
        if not failed and not broken:
            return {}
        await self.close(servers)
        return {url: failed.get(url) or "; ".join([*broken, *failed.values()]) for url in urls}

    async def _count_ranks(self, servers: Sequence[SGLangClient]) -> tuple[dict[str, int], dict[str, str]]:
        """Return the number of ranks of each server, and url -> reason for servers without a usable
        answer. Notes which servers stage updates.
        """
        num_ranks: dict[str, int] = {}

        async def ask(server: SGLangClient) -> None:
            info = await server.server_info()
            num_ranks[server.url] = parse_num_ranks(info, server=server.url)
            if info.get("stages_updates") is True:
                self._staging.add(server.url)

        failed = await for_each(servers, ask, timeout_s=PING_S, limit="the time limit of a request")
        return num_ranks, failed

    @property
    def _groups(self) -> list[str]:
        """Names of the groups, one for each source."""
        # Never reused: a server that missed the last publish, or is from an earlier run, may still hold its
        # old groups.
        name = f"agentrl_weights_{self._name}_{self._num_formed}"
        return [f"{name}_{source}" for source in range(self._config.sources)]

    async def close(self, servers: Sequence[SGLangClient] = ()) -> None:
        """Leave the process groups, and make their members among `servers` leave them too, if they answer."""
        if self._members:
            await self._learner.run(Learner.leave_weights_group)
            await self.abandon(servers)

    async def abandon(self, servers: Sequence[SGLangClient]) -> None:
        """Make members of the process groups among `servers` leave them, if they answer; the learner has
        left.
        """

        async def leave(server: SGLangClient) -> None:
            for name in self._groups:
                with suppress(ServerError):  # a restarted server is in no group
                    await server.destroy_weights_group(name)

        await for_each(
            [s for s in servers if s.url in self._members],
            leave,
            timeout_s=PING_S,
            limit="the time limit of a request",
        )
        self._members = ()
