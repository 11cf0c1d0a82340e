"""`ServerHandle`: one server as the fleet sees it, whether this run started it or attached to it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol

import ray
from ray import ObjectRef

from agentrl.cluster.actors import ActorKind, get
from agentrl.cluster.pools import Seat
from agentrl.cluster.starting import num_done
from agentrl.config.model import ModelConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.errors import AgentRLError, InfrastructureError
from agentrl.servers.health import ServerStatus
from agentrl.servers.launch import launcher
from agentrl.servers.startup import Readiness
from agentrl.servers.supervisor import Supervisor

SUPERVISOR_START_S = 300.0
"""On top of `rollout.server_start_timeout_s`, which the supervisor enforces: ends supervisors that hang."""
UNPUBLISHED = "default"
"""Version of a server before its first publish; the client refuses tokens that carry it."""

# Several threads: `status` and `stop` must be answered while `start` waits for the model to load.
SERVER = ActorKind("ServerActor", "a server's supervisor", timeout_s=30.0, num_threads=4)


class SupervisorLost(InfrastructureError):
    """The Ray actor that watches a server died or does not answer, perhaps with its machine."""


class ServerHandle(Protocol):
    """A server and whoever watches it: a `Supervisor` behind a Ray actor, or an `AttachedServer` in this
    process.

    name: for display until the URL is known.
    origin: whether this run started the server.
    api_key: key that requests to the server must carry.
    starting, readiness, wait_until_ready: as of every part that starts (`workers.readiness.Starting`).
    """

    name: str
    api_key: str | None

    @property
    def origin(self) -> Literal["started", "attached"]: ...

    @property
    def starting(self) -> Mapping[ObjectRef, float]: ...

    @property
    def readiness(self) -> Readiness: ...

    def wait_until_ready(self) -> None: ...

    def begin_status(self) -> None:
        """Begin `status` without waiting, so that one deadline is enough for all servers."""

    def status(self) -> ServerStatus:
        """Return the server's state; does not wait for a server that is starting.

        Raises:
            SupervisorLost: nobody watches the server any more.
            InfrastructureError: the server did not start in time.
        """

    def mark_ready(self, url: str) -> None:
        """Record that the server has the current weights.

        Ignored if the server at `url` was replaced since.
        """

    def restart(self, url: str) -> None:
        """Have a server that did not obey replaced, or waited for if it is attached.

        Ignored like `mark_ready`.
        """

    def begin_stop(self) -> None:
        """Begin `stop` without waiting, so that several servers stop at once."""

    def stop(self) -> None:
        """Stop watching; a server that this run started ends, an attached one keeps running."""


class StartedServer:
    """A server that this run starts in a seat: a Ray actor on the seat's machine supervises its process.

    The constructor returns at once.

    Args:
        is_open: listen for other machines, too.
    """

    origin: Literal["started"] = "started"

    def __init__(
        self,
        name: str,
        rollout: RolloutConfig,
        model: ModelConfig,
        *,
        seat: Seat,
        run_dir: Path,
        is_open: bool,
        api_key: str,
    ) -> None:
        self.name = name
        self.api_key: str | None = api_key
        log_file = run_dir / "servers" / f"{name}.log"
        self._actor = SERVER.launch(
            seat.ray_options(), supervisor, rollout, model, log_file, api_key=api_key, is_open=is_open
        )
        # None: the start has ended
        self._start: ObjectRef | None = self._actor.begin(Supervisor.start, model.path, UNPUBLISHED)
        self._deadline = time.monotonic() + rollout.server_start_timeout_s + SUPERVISOR_START_S
        self._last = ServerStatus("", "starting", rollout.backend)
        self._asked: tuple[ObjectRef, float] | None = None  # `status` that has begun, and its deadline
        self._stop: ObjectRef | None = None
        self._stop_deadline = 0.0

    @property
    def starting(self) -> Mapping[ObjectRef, float]:
        return {} if self._start is None else {self._start: self._deadline}

    @property
    def readiness(self) -> Readiness:
        start = self._start
        return Readiness("servers", 1 if start is None else num_done([start]), 1)

    def wait_until_ready(self) -> None:
        if self._start is not None:
            get(self._start, timeout_s=max(0.0, self._deadline - time.monotonic()), who=SERVER.who)
            self._start = None

    def begin_status(self) -> None:
        if self.readiness.is_ready:
            deadline = time.monotonic() + SERVER.timeout_s
            self._asked = self._actor.begin(Supervisor.status), deadline

    def status(self) -> ServerStatus:
        if not self.readiness.is_ready:
            if time.monotonic() > self._deadline:
                who = self._last.url or self.name
                raise InfrastructureError(
                    f"server {who} did not start: no free resources, or its machine hangs"
                )
            return self._last
        self._start = None
        if self._asked is None:
            self.begin_status()
        assert self._asked is not None
        (ref, deadline), self._asked = self._asked, None
        try:
            self._last = get(ref, timeout_s=max(0.0, deadline - time.monotonic()), who=SERVER.who)
        except InfrastructureError as error:
            raise SupervisorLost(str(error)) from error
        return self._last

    def mark_ready(self, url: str) -> None:
        with suppress(InfrastructureError):  # the next `status` reports a lost supervisor
            self._actor.run(Supervisor.mark_ready, url)

    def restart(self, url: str) -> None:
        with suppress(InfrastructureError):
            self._actor.run(Supervisor.restart, url)

    def begin_stop(self) -> None:
        self._stop = self._actor.begin(Supervisor.stop)
        self._stop_deadline = time.monotonic() + SERVER.timeout_s

    def stop(self) -> None:
        if self._stop is None:
            self.begin_stop()
        assert self._stop is not None
        with suppress(AgentRLError):  # the server of a dead actor died with it
            get(self._stop, timeout_s=max(0.0, self._stop_deadline - time.monotonic()), who=SERVER.who)
        self._actor.kill()


def supervisor(
    rollout: RolloutConfig, model: ModelConfig, log_file: Path, *, api_key: str, is_open: bool
) -> Supervisor:
    """Return the supervisor of a server of the kind `rollout.backend`, in its process.

    Args:
        log_file: of the server.
        api_key: required by the server in every request.
        is_open: listen on the node's IP address, for other machines; otherwise on 127.0.0.1 only.
    """
    return Supervisor(
        launcher(rollout, model, api_key=api_key),
        log_file=log_file,
        start_timeout_s=rollout.server_start_timeout_s,
        max_restarts=rollout.max_server_restarts,
        hang_timeout_s=rollout.server_hang_timeout_s,
        kind=rollout.backend,
        host=ray.util.get_node_ip_address() if is_open else "127.0.0.1",
    )
