"""What all transports share: calls to the learner, the pause of a server, and the division into buckets."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import trio

from agentrl.cluster.workers import Workers
from agentrl.config.rollout import WeightsConfig
from agentrl.learner.learner import Learner
from agentrl.plugins.sources import at_place
from agentrl.servers.client import SGLangClient, for_each
from agentrl.types import SendTimes, TensorSpec
from agentrl.weights.pace import Pace

P = ParamSpec("P")
T = TypeVar("T")

PING_S = 10.0
"""A server that does not report its version within this time is dead or hangs; no update could reach it."""

Hold = Callable[[SGLangClient], AbstractAsyncContextManager[bool]]
"""Context manager that pauses a server; yields whether its cache may be flushed.

If the block succeeds, the weights are checked and the server resumes. After a failure the server stays
paused, because its weights may be a mix of old and new under the old version.
"""


@dataclass(frozen=True, slots=True)
class Sent:
    """What one attempt sent to all servers together, and the servers it failed for (url -> reason)."""

    num_bytes: int
    failed: Mapping[str, str] = field(default_factory=dict)
    times: SendTimes | None = None


class Transport(ABC):
    """One way to move weights from the learner to the servers. Its methods are called one at a time."""

    def __init__(self, learner: LearnerCalls, config: WeightsConfig, *, folder: Path) -> None:
        """`folder`: of the run, for files that servers read."""
        self._learner = learner
        self._folder = folder
        self._config = config
        self._pace = Pace(config.timeout_s)
        self._specs: Sequence[TensorSpec] | None = None

    @abstractmethod
    async def prepare(self, version: int) -> None:
        """Do the work that needs no server, once per publish, while the servers keep sampling.

        Raises:
            InfrastructureError: it failed.
        """

    @abstractmethod
    async def send(self, version: int, servers: Sequence[SGLangClient], hold: Hold) -> Sent:
        """Bring all of `servers` to `version`. A server that fails is an entry in the result, never an
        exception.

        Raises:
            InfrastructureError: the learner's side failed.
        """

    async def close(self, servers: Sequence[SGLangClient] = ()) -> None:
        """Release what is kept between publishes, also on `servers`. Most transports keep nothing."""

    async def abandon(self, servers: Sequence[SGLangClient]) -> None:
        """Make `servers` release what is kept between publishes, after the learner is gone."""

    async def _try_each(
        self,
        servers: Sequence[SGLangClient],
        action: Callable[[SGLangClient], Awaitable[None]],
        *,
        num_bytes: int,
    ) -> dict[str, str]:
        """Run `action(server)` on all servers, with the deadline of an attempt; return url -> reason for
        those that failed.

        num_bytes: that each server gets.
        """
        started = trio.current_time()
        failed = await for_each(
            servers, action, timeout_s=self._pace.allowed_s(num_bytes), limit=self._pace.limit(num_bytes)
        )
        if not failed:
            self._pace.observe(num_bytes, trio.current_time() - started)
        return failed

    async def _tensor_specs(self) -> Sequence[TensorSpec]:
        """Return the published weights; the learner is asked once, because they never change."""
        if self._specs is None:
            self._specs = await self._learner.run(Learner.tensor_specs)
        return self._specs


def open_transport(learner: LearnerCalls, config: WeightsConfig, *, folder: Path) -> Transport:
    """Return the transport of `config.transport`."""
    transport: Transport = at_place(config.kind.opens)(learner, config, folder=folder)
    return transport


class LearnerCalls:
    """Calls of a learner's ranks from trio: each blocks a worker thread, and only one runs at a time.

    A blocked collective cannot be interrupted. So a call that is cancelled, by the deadline of a server or
    the end of the run, abandons its thread. The next call waits until the abandoned one has ended: the ranks
    must get their calls in one order, and a file must have one writer.
    """

    def __init__(self, learner: Workers[Learner]) -> None:
        self.learner = learner
        self._turn = trio.Lock()
        # A lock of threads, because it must outlive the task of an abandoned call, and its trio.run.
        self._running = threading.Lock()

    async def run(
        self, method: Callable[Concatenate[Learner, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a marked method on the ranks, as `Workers.run` does."""
        return await self.call(partial(self.learner.run, method, *args, **kwargs))

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function`, which calls the ranks, in a thread."""

        def run_alone() -> T:
            with self._running:
                trio.from_thread.check_cancelled()  # abandoned while it waited: nobody wants the result
                return function()

        async with self._turn:
            return await trio.to_thread.run_sync(run_alone, abandon_on_cancel=True)


def sum_bytes(specs: Sequence[TensorSpec]) -> int:
    """Return the bytes of all tensors together."""
    return sum(spec.num_bytes for spec in specs)
