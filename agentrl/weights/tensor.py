"""Transport `tensor`: weights inside HTTP requests to servers on this machine, without disk or process group.

SGLang expects them pickled. Pickles are only sent, and only within this machine; the embedded server rejects
them. Tensors on a GPU are copied through host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import trio

from agentrl.config.rollout import WeightsConfig
from agentrl.errors import RequestRefused, ServerError
from agentrl.learner.buckets import plan_buckets
from agentrl.learner.learner import Learner
from agentrl.loopback import is_local
from agentrl.servers.client import SGLangClient
from agentrl.servers.protocol import parse_setting
from agentrl.types import TensorSpec
from agentrl.weights.transport import Hold, LearnerCalls, Sent, Transport, sum_bytes


class TensorTransport(Transport):
    """Each bucket is gathered and pickled once, and kept until all servers have received it."""

    def __init__(self, learner: LearnerCalls, config: WeightsConfig, *, folder: Path) -> None:
        super().__init__(learner, config, folder=folder)
        self._buckets: list[list[TensorSpec]] = []

    async def prepare(self, version: int) -> None:
        self._buckets = plan_buckets(await self._tensor_specs(), max_bytes=self._config.bucket_bytes)

    async def send(self, version: int, servers: Sequence[SGLangClient], hold: Hold) -> Sent:
        pickles = _Pickles(self._learner, self._buckets, num_takers=len(servers))

        async def load(server: SGLangClient) -> None:
            if not is_local(urlsplit(server.url).hostname or ""):
                raise ServerError(
                    f"{server.url} is on another machine, but the transport `tensor` sends pickles "
                    "and works only locally; use disk or distributed"
                )
            num_ranks = parse_setting(await server.server_info(), "tp_size", default=1, server=server.url)
            async with hold(server) as may_flush:
                with suppress(RequestRefused):  # refused unless an aborted attempt left a session open
                    await server.end_weight_update()
                await server.begin_weight_update()
                for index in range(len(self._buckets)):
                    is_last = index == len(self._buckets) - 1
                    await server.update_weights_from_tensor(
                        await pickles.take(index),
                        num_ranks=num_ranks,
                        version=version if is_last else None,
                        flush_cache=may_flush and is_last,
                    )
                await server.end_weight_update()

        num_bytes = sum_bytes(await self._tensor_specs())
        failed = await self._try_each(servers, load, num_bytes=num_bytes)
        return Sent(num_bytes * len(servers), failed)


class _Pickles:
    """Pickled buckets for `num_takers` servers, each of which takes all buckets in order."""

    def __init__(
        self, learner: LearnerCalls, buckets: Sequence[Sequence[TensorSpec]], *, num_takers: int
    ) -> None:
        self._learner = learner
        self._buckets = buckets
        self._num_takers = num_takers
        self._held: dict[int, tuple[str, int]] = {}  # index -> (pickle, number of times taken)
        self._making = trio.Lock()

    async def take(self, index: int) -> str:
        # The first server to ask for a bucket makes it; the others wait here for the same pickle.
        async with self._making:
            if index not in self._held:
                names = [spec.name for spec in self._buckets[index]]
                self._held[index] = (await self._learner.run(Learner.pickle_bucket, names), 0)
            pickled, times = self._held[index]
            self._held[index] = (pickled, times + 1)
            if times + 1 == self._num_takers:
                del self._held[index]
            return pickled
