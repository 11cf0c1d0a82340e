"""Publishing of a version: pause the servers, send the weights, check them, resume.

Every token sampled afterwards carries the new version. Either all weights are sent, with adapters merged, or
only a LoRA adapter (`rollout.weights.adapter`).

A publish is all or nothing per server. A server that failed but still answers gets a second attempt, alone.
Servers that still fail are in `PublishReport.failed`; they are paused or dead, and must not get traffic until
a later `publish` succeeds. The router holds them back because their version is old.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from agentrl.cluster.workers import Workers
from agentrl.config.rollout import WeightsConfig
from agentrl.learner.learner import Learner
from agentrl.servers.client import SGLangClient, for_each
from agentrl.servers.protocol import PauseMode
from agentrl.types import SendTimes, ServerPause
from agentrl.weights.pace import Pace
from agentrl.weights.transport import PING_S, LearnerCalls, Sent, open_transport
from agentrl.weights.verify import Verifier, check_known


@dataclass(frozen=True, slots=True)
class PublishReport:
    """Cost of one publish, and the servers that it failed for (url -> reason in one line).

    seconds: duration of the publish.
    num_bytes: sent to all servers together, including second attempts.
    repaired: servers that needed a second attempt, with the reason of the first failure.
    times: the learner's share, for a transport that sends buckets.
    pauses: how long each server did not sample.
    """

    version: int
    seconds: float
    num_bytes: int
    failed: Mapping[str, str] = field(default_factory=dict)
    repaired: Mapping[str, str] = field(default_factory=dict)
    times: SendTimes | None = None
    pauses: Sequence[ServerPause] = ()


class Publisher:
    """Publishes versions of one learner to a changing set of servers, over one transport.

    Call `transport.close` at the end, or `transport.abandon` after the learner is gone: servers keep a
    process group.

    pause_mode: for all servers, or a function of a server's URL.
    temperature: of the rollout; `rollout.weights.verify` samples with it.
    model: model folder that servers start from; the first publish compares names and shapes with it. None: no
    check.
    """

    def __init__(
        self,
        learner: Workers[Learner],
        config: WeightsConfig,
        *,
        folder: Path,
        pause_mode: PauseMode | Callable[[str], PauseMode],
        temperature: float = 1.0,
        model: Path | None = None,
    ) -> None:
        self._learner = LearnerCalls(learner)
        self._is_alone = config.adapter == "alone"
        self._config = config
        self._pause_mode = pause_mode
        self._temperature = temperature
        self._is_verified = config.verify
        self._unchecked = None if self._is_alone else model
        self._pauses: list[ServerPause] = []
        self.transport = open_transport(self._learner, config, folder=folder)

    async def publish(
        self, version: int, servers: Sequence[SGLangClient], *, must_verify: bool = False
    ) -> PublishReport:
        """Bring `servers` to `version`; the report names those that failed.

        must_verify: check the weights even if `rollout.weights.verify` is off.

        Raises:
            InfrastructureError: the learner's side failed; the servers may have any version.
            ConfigError: at the first publish, the servers do not know a weight.
        """
        started = time.monotonic()
        self._pauses = []
        if self._unchecked is not None:
            check_known(await self._learner.run(Learner.tensor_specs), self._unchecked)
            self._unchecked = None
        verifier = (
            Verifier(self._learner, self._is_alone, self._temperature)
            if self._is_verified or must_verify
            else None
        )
        hold = partial(self._held, version=version, verifier=verifier)
        await self.transport.prepare(version)
        # Ping first: a hanging server would block all others of its group until the deadline.
        failed = await self._find_silent(servers)
        answering = _without(servers, failed)
        first = await self.transport.send(version, answering, hold) if answering else Sent(0)
        missed = [server for server in answering if server.url in first.failed]
        failed |= {url: first.failed[url] for url in await self._find_silent(missed)}
        attempts = [first]
        for server in _without(missed, failed):
            # One server at a time: in a common group, one failure fails them all.
            attempts.append(await self.transport.send(version, [server], hold))
            failed |= attempts[-1].failed
        report = _report(version, time.monotonic() - started, attempts, failed)
        return replace(report, pauses=self._pauses)

    async def _find_silent(self, servers: Sequence[SGLangClient]) -> dict[str, str]:
        """Return url -> reason for the servers that do not answer: dead or hanging."""

        async def ask(server: SGLangClient) -> None:
            await server.model_info()

        return await for_each(
            servers, ask, timeout_s=min(PING_S, self._config.timeout_s), limit="the time limit of a request"
        )

    @asynccontextmanager
    async def _held(
        self, server: SGLangClient, *, version: int, verifier: Verifier | None
    ) -> AsyncIterator[bool]:
        mode = self._mode_of(server)
        paused_ns = time.time_ns()
        await server.pause(mode)
        # True: the cache may be flushed. SGLang answers 400 to a flush while requests are held in place;
        # their KV cache stays stale by design.
        yield mode != "in_place"
        # Reached only if the block succeeded: after an exception the server stays paused (see `Hold`).
        is_checked = verifier is None or await verifier.sums_agree(server)
        await server.resume()
        self._pauses.append(ServerPause(server.url, paused_ns, time.time_ns()))
        if verifier is not None and not is_checked:
            await verifier.samples_agree(server, version)

    def _mode_of(self, server: SGLangClient) -> PauseMode:
        if self._is_alone:
            # SGLang unloads an adapter only when no request uses it, and no request may run with two
            # adapters.
            return "abort"
        return self._pause_mode(server.url) if callable(self._pause_mode) else self._pause_mode


async def load_folder(
    folder: str, version: int, servers: Sequence[SGLangClient], *, timeout_s: float
) -> PublishReport:
    """Load an exported policy other than the learner's on `servers`, which must be idle."""
    started = time.monotonic()
    num_bytes = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    pace = Pace(timeout_s)

    async def load(server: SGLangClient) -> None:
        await server.update_weights_from_disk(folder, version=version, flush_cache=True)

    failed = await for_each(servers, load, timeout_s=pace.allowed_s(num_bytes), limit=pace.limit(num_bytes))
    return PublishReport(version, time.monotonic() - started, 0, failed)


def _without(servers: Sequence[SGLangClient], failed: Mapping[str, str]) -> list[SGLangClient]:
    return [server for server in servers if server.url not in failed]


def _report(
    version: int, seconds: float, attempts: Sequence[Sent], failed: Mapping[str, str]
) -> PublishReport:
    return PublishReport(
        version,
        seconds,
        sum(sent.num_bytes for sent in attempts),
        failed,
        repaired={url: why for url, why in attempts[0].failed.items() if url not in failed},
        times=next((sent.times for sent in reversed(attempts) if sent.times is not None), None),
    )
