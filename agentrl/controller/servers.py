"""The inference servers of a run: started and supervised by one Ray actor each, or attached by URL."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from agentrl.config.schema import Config
from agentrl.controller.calls import get
from agentrl.errors import AgentRLError, ConfigError, InfrastructureError
from agentrl.serving.actor import ServerActor
from agentrl.serving.supervisor import ServerStatus, probe
from agentrl.sglang.client import SGLangClient
from agentrl.workers.pools import Seat

POLL_TIMEOUT_S = 30.0
SUPERVISOR_START_S = 300.0
"""Beyond `rollout.server_start_timeout_s`, which the supervisor keeps itself once it stands: this only ends what hangs."""
UNPUBLISHED = "default"
"""Version of a server before its first publish; the client refuses tokens that carry it."""


@dataclass
class _Server:
    """One server: its actor (None when attached by URL) and what was last heard of it."""

    actor: ActorHandle | None
    status: ServerStatus
    starting: ObjectRef | None = None


class ServerFleet:
    """All servers of a run. `urls` are those that hold the current weights and may take traffic."""

    def __init__(self, servers: list[_Server], *, api_key: str | None, start_timeout_s: float) -> None:
        self._servers = servers
        self._api_key = api_key
        self._deadline = time.monotonic() + start_timeout_s + SUPERVISOR_START_S

    @classmethod
    def launch(cls, config: Config, seats: Sequence[Seat], *, run_dir: Path) -> ServerFleet:
        """Begin to start a server in every seat (or attach to those of rollout.urls); `wait_until_ready` ends it."""
        rollout = config.rollout
        api_key = _api_key(rollout.api_key_env)
        if rollout.urls:
            statuses = [probe(url, api_key=api_key, timeout_s=rollout.server_start_timeout_s) for url in rollout.urls]
            return cls([_Server(None, status) for status in statuses], api_key=api_key, start_timeout_s=rollout.server_start_timeout_s)
        servers = []
        for index, seat in enumerate(seats):
            options = ServerActor.options(**seat.ray_options())  # type: ignore[attr-defined]  # ray's stubs keep the plain class
            actor = options.remote(f"server_{index}", rollout, config.model, run_dir=str(run_dir))
            servers.append(_Server(actor, ServerStatus("", "starting"), actor.start.remote(config.model.path, UNPUBLISHED)))
        return cls(servers, api_key=api_key, start_timeout_s=rollout.server_start_timeout_s)

    @property
    def starting(self) -> Mapping[ObjectRef, float]:
        """The servers that are not known to generate, and until when they have to (of the monotonic clock)."""
        return {s.starting: self._deadline for s in self._servers if s.starting is not None}

    def wait_until_ready(self) -> None:
        """Wait until every server generates; none may take traffic before a publish.

        Raises:
            InfrastructureError: one did not come up within `rollout.server_start_timeout_s`; the message ends with its log.
        """
        get(list(self.starting), timeout_s=max(0.0, self._deadline - time.monotonic()), who="a server's supervisor")
        for server in self._servers:
            server.starting = None
        self.poll()

    # ---------------------------------------------------------------------------------------------------- state

    @property
    def urls(self) -> list[str]:
        return [s.status.url for s in self._servers if s.status.state == "ready"]

    @property
    def urls_needing_weights(self) -> list[str]:
        return [s.status.url for s in self._servers if s.status.state == "needs_weights"]

    @property
    def states(self) -> dict[str, str]:
        """URL -> starting, ready, needs_weights or failed."""
        return {s.status.url or f"server {index}": s.status.state for index, s in enumerate(self._servers)}

    def poll(self) -> None:
        """Ask every supervisor.

        Raises:
            InfrastructureError: a server used up its restarts, or its supervisor died.
        """
        supervised = [s for s in self._servers if s.actor is not None]
        refs = [s.actor.status.remote() for s in supervised if s.actor is not None]
        statuses = get(refs, timeout_s=POLL_TIMEOUT_S, who="a server's supervisor")
        for server, status in zip(supervised, statuses, strict=True):
            server.status = status
        for server in self._servers:
            if server.status.state == "failed":
                raise InfrastructureError(f"server {server.status.url or '(never up)'} is lost for good: {server.status.message}")

    def mark_ready(self, urls: Sequence[str]) -> None:
        """Record that `urls` hold the current weights."""
        for server in self._servers:
            if server.status.url in urls:
                if server.actor is None:
                    server.status = replace(server.status, state="ready")
                else:
                    get(server.actor.mark_ready.remote(), timeout_s=POLL_TIMEOUT_S, who="a server's supervisor")
        self.poll()

    def restart(self, url: str, *, why: str) -> None:
        """End a server that did not take its weights; its supervisor starts it anew.

        Raises:
            InfrastructureError: the server was attached by URL, so it is not ours to restart.
        """
        for server in self._servers:
            if server.status.url == url:
                if server.actor is None:
                    raise InfrastructureError(f"attached server {url} did not take the weights: {why}")
                get(server.actor.restart.remote(), timeout_s=POLL_TIMEOUT_S, who="a server's supervisor")
        self.poll()

    def pids(self) -> list[int]:
        """Return the process ids of the supervised servers."""
        return [s.status.pid for s in self._servers if s.status.pid]

    def clients(self, urls: Sequence[str]) -> list[SGLangClient]:
        """Return a client for each URL; to be used within one trio.run."""
        return [SGLangClient(url, api_key=self._api_key) for url in urls]

    def close(self) -> None:
        """Stop every server that this run started."""
        actors = [s.actor for s in self._servers if s.actor is not None]
        with suppress(AgentRLError):  # an actor that is already gone has taken its server with it
            get([actor.stop.remote() for actor in actors], timeout_s=POLL_TIMEOUT_S, who="a server's supervisor")
        for actor in actors:
            ray.kill(actor)


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ConfigError(f"rollout.api_key_env={variable!r}: this environment variable is not set")
    return os.environ[variable]
