"""`VirtualFleet`: servers and rollout actors of a simulation: modelled engines, real managers and routers."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import trio

from agentrl.cluster.remote_buffer import RemoteBuffer
from agentrl.config.schema import Config
from agentrl.data.attempt_files import TrajectoryRef
from agentrl.extras.plan.client import EngineClient
from agentrl.extras.plan.engine import ServerSpeed, VirtualServer
from agentrl.extras.plan.players import VirtualParts
from agentrl.extras.plan.process import BufferProcess
from agentrl.extras.plan.turns import Turns
from agentrl.extras.plan.workload import ScriptSource
from agentrl.rollout.manager import AgentLoopManager
from agentrl.servers.router import Router
from agentrl.types import Trajectory

FOLDER = Path("simulated")
"""Folder of the trajectories, which does not exist: nobody reads them."""


class MemoryStore:
    """Stores nothing: `agentrl.cluster.remote_buffer.Store`. The checksum is the token of the attempt."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._numbers = itertools.count()

    async def store(self, trajectories: Sequence[Trajectory]) -> list[TrajectoryRef]:
        path = str(FOLDER / f"{self._owner}-{next(self._numbers)}")
        return [TrajectoryRef(path, index, 1, int(t.token_ids[-1])) for index, t in enumerate(trajectories)]


@dataclass(eq=False)
class RolloutActor:
    """One incarnation of a rollout actor."""

    owner: str
    manager: AgentLoopManager
    router: Router
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    is_dead: bool = False


class VirtualFleet:
    """Runs engines and rollout actors in `nursery`.

    speeds: of each server, by URL.
    tend_s: interval of the routers' checks of their servers.
    """

    def __init__(
        self,
        config: Config,
        nursery: trio.Nursery,
        process: BufferProcess,
        scripts: ScriptSource,
        turns: Turns,
        *,
        speeds: dict[str, ServerSpeed],
        tend_s: float,
        name: str,
    ) -> None:
        self._config = config
        self._nursery = nursery
        self._process = process
        self._scripts = scripts
        self._turns = turns
        self._tend_s = tend_s
        self._name = name
        self._num_started = 0
        self._urls: list[str] = []
        self._version = -1
        self.engines = {url: VirtualServer(speed) for url, speed in speeds.items()}
        self.actors: list[RolloutActor] = []
        for engine in self.engines.values():
            nursery.start_soon(engine.run)

    def start_actors(self) -> None:
        """Start all rollout actors."""
        self.actors = [self._start(index) for index in range(self._config.rollout.num_actors)]

    def _start(self, index: int) -> RolloutActor:
        rollout = self._config.rollout
        owner = f"{self._name}-{index}-{self._num_started}"
        self._num_started += 1
        router = Router(
            lambda url: EngineClient(self.engines[url], self._turns),
            max_silence_s=rollout.max_server_silence_s,
            max_pause_s=rollout.weights.timeout_s,
            tend_s=self._tend_s,
        )
        router.set_servers(self._urls, version=self._version)
        manager = AgentLoopManager(
            self._config.agent,
            rollout,
            self._config.reward,
            router,
            VirtualParts(self._scripts, self._turns),
            attempts_per_group=self._config.attempts_per_group,
        )
        actor = RolloutActor(owner, manager, router)
        self._nursery.start_soon(self._run, actor)
        return actor

    async def _run(self, actor: RolloutActor) -> None:
        remote = RemoteBuffer(actor.owner, self._process, MemoryStore(actor.owner))
        with actor.scope:
            await actor.manager.run(remote, remote)

    def kill(self, index: int) -> None:
        """Kill a rollout actor; `heal` replaces it."""
        actor = self.actors[index]
        actor.is_dead = True
        actor.scope.cancel()

    async def heal(self, release: Callable[[str], Awaitable[object]]) -> None:
        """Replace dead actors. `release`: called first with the name of each."""
        for index, actor in enumerate(self.actors):
            if actor.is_dead:
                await release(actor.owner)
                self.actors[index] = self._start(index)

    def set_servers(self, urls: Sequence[str], *, version: int) -> None:
        """Send all actors their servers and the minimum version that a server must have."""
        self._urls, self._version = list(urls), version
        for actor in self.actors:
            if not actor.is_dead:
                actor.router.set_servers(urls, version=version)
