"""`ServerFleet`: the inference servers of a run, each supervised by a Ray actor or attached by URL.

A *guest* is a server that joined during the run. Losing a guest is reported and the run continues; losing any
other server for good ends the run. If a supervisor is lost, for example with its machine, a guest is started
in its seat; Ray places it as soon as resources are free.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import ray
from ray import ObjectRef

from agentrl.cluster.actors import get
from agentrl.cluster.pools import Seat
from agentrl.cluster.server_handle import SERVER, ServerHandle, StartedServer, SupervisorLost
from agentrl.config.model import ModelConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.config.server_urls import refuse_url
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.rollout.limits import key_of_started, num_ids_of, server_key
from agentrl.servers.attached import AttachedServer
from agentrl.servers.client import SGLangClient
from agentrl.servers.health import ServerKind, ServerStatus
from agentrl.servers.startup import Readiness
from agentrl.servers.trio_run import in_trio

T = TypeVar("T")


@dataclass
class _Member:
    """A server and its last known status. seat: None if the server is attached."""

    handle: ServerHandle
    status: ServerStatus
    is_guest: bool
    seat: Seat | None = None

    @property
    def label(self) -> str:
        return self.status.url or self.handle.name


@dataclass(frozen=True, slots=True)
class ServerLine:
    """A server as `agentrl servers list` shows it.

    origin: `started`, `attached`, or the name of a frozen model that it was started for.
    """

    name: str
    url: str
    origin: str
    kind: str
    state: str
    restarts: int
    message: str

    @classmethod
    def of(cls, handle: ServerHandle, status: ServerStatus) -> ServerLine:
        return cls(
            handle.name,
            status.url,
            handle.origin,
            status.kind or "unknown",
            status.state,
            status.restarts,
            status.message,
        )


class ServerFleet:
    """All servers of one model of a run. `urls` are those with the current weights, which may take traffic.

    name: begins the names of started servers and of their logs.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        model: ModelConfig,
        *,
        run_dir: Path,
        say: Callable[[str], None],
        name: str = "server",
    ) -> None:
        self._name = name
        self._rollout = rollout
        self._model = model
        self._run_dir = run_dir
        self._say = say
        self._api_key = server_key(rollout.api_key_env)
        self._key_of_started = key_of_started(rollout.api_key_env)
        self._members: list[_Member] = []
        self._free_seats: list[Seat] = []
        self._num_started = 0
        self._replacements_left = rollout.max_server_restarts * rollout.num_started
        self._is_open = False

    @classmethod
    def launch(
        cls,
        rollout: RolloutConfig,
        model: ModelConfig,
        seats: Sequence[Seat],
        *,
        run_dir: Path,
        say: Callable[[str], None],
        name: str = "server",
    ) -> ServerFleet:
        """Launch a server in every seat and attach to rollout.urls; see `wait_until_ready`.

        Raises:
            ConfigError: the key of the servers is missing.
        """
        fleet = cls(rollout, model, run_dir=run_dir, say=say, name=name)
        for seat in seats:
            fleet._start(seat)
        for url in rollout.urls:
            fleet._attach(url)
        return fleet

    def _attach(self, url: str, *, is_guest: bool = False) -> _Member:
        rollout = self._rollout
        server = AttachedServer(
            url,
            start_timeout_s=rollout.server_start_timeout_s,
            hang_timeout_s=rollout.server_hang_timeout_s,
            max_restarts=rollout.max_server_restarts,
            api_key=self._api_key,
        )
        server.start()
        return self._add(_Member(server, server.status(), is_guest))

    def _start(self, seat: Seat, *, is_guest: bool = False) -> _Member:
        name = f"{self._name}_{self._num_started}"
        self._num_started += 1
        is_open, key = self._listens_to_the_network(), self._key_of_started
        server = StartedServer(
            name, self._rollout, self._model, seat=seat, run_dir=self._run_dir, is_open=is_open, api_key=key
        )
        return self._add(_Member(server, ServerStatus("", "starting", self._rollout.backend), is_guest, seat))

    def _add(self, member: _Member) -> _Member:
        self._members.append(member)
        return member

    def _listens_to_the_network(self) -> bool:
        """Return whether servers must be reachable from other machines.

        They must if Ray has several nodes: agents and learner may run on any of them.
        """
        machines = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        self._is_open |= len(machines) > 1  # sticky: a lost machine may return
        return self._is_open

    # ----------------------------------------------------------------------------------------------- start-up

    @property
    def starting(self) -> Mapping[ObjectRef, float]:
        """The started servers that do not generate yet, each with its deadline (monotonic clock, seconds)."""
        return {ref: deadline for handle in self._handles for ref, deadline in handle.starting.items()}

    @property
    def readiness(self) -> Readiness:
        parts = [handle.readiness for handle in self._handles]
        return Readiness(
            "servers",
            sum(part.num_ready for part in parts),
            len(parts),
            any(part.may_come for part in parts),
            next((part.waits_for for part in parts if part.waits_for), ""),
        )

    @property
    def _handles(self) -> list[ServerHandle]:
        return [member.handle for member in list(self._members)]  # a copy, because other threads may read

    def wait_until_attached(self) -> list[str]:
        """Wait until every server of rollout.urls generates; return their URLs.

        Raises ServerError on a timeout.
        """
        attached = [handle for handle in self._handles if handle.origin == "attached"]
        for handle in attached:
            handle.wait_until_ready()
        return [handle.status().url for handle in attached]

    def wait_until_ready(self) -> None:
        """Wait until every server generates. None may take traffic before the first publish.

        Raises:
            InfrastructureError: a server did not start in `rollout.server_start_timeout_s`; the message ends
                with its log.
        """
        if pending := self.starting:
            # All at once: the first that fails ends the wait, however long the others still take.
            timeout_s = max(0.0, max(pending.values()) - time.monotonic())
            get(list(pending), timeout_s=timeout_s, who=SERVER.who)
        for handle in self._handles:
            handle.wait_until_ready()
        self.poll()

    # -------------------------------------------------------------------------------------------------- state

    @property
    def urls(self) -> list[str]:
        return [m.status.url for m in self._members if m.status.state == "ready"]

    @property
    def urls_needing_weights(self) -> list[str]:
        return [m.status.url for m in self._members if m.status.state == "needs_weights"]

    @property
    def guests_needing_weights(self) -> list[str]:
        return [m.status.url for m in self._members if m.is_guest and m.status.state == "needs_weights"]

    @property
    def states(self) -> dict[str, str]:
        """URL (or name, until the URL is known) -> starting, ready, needs_weights or failed."""
        return {m.label: m.status.state for m in self._members}

    @property
    def lines(self) -> list[ServerLine]:
        """All servers, for display."""
        return [ServerLine.of(m.handle, m.status) for m in self._members]

    def kind_of(self, url: str) -> ServerKind:
        """Return the kind of server at `url`; `rollout.backend` if the server did not report its kind."""
        return next(
            (m.status.kind for m in self._members if m.status.url == url and m.status.kind),
            self._rollout.backend,
        )

    def has_restarted(self, url: str) -> bool:
        return any(m.status.url == url and m.status.restarts for m in self._members)

    def poll(self) -> None:
        """Poll every supervisor, all at once. A lost guest is reported and removed.

        Raises:
            InfrastructureError: a server that is no guest used up its restarts, or no server is left.
        """
        members = list(self._members)
        for member in members:
            member.handle.begin_status()
        for member in members:
            try:
                self._ask(member)
            except InfrastructureError as error:
                if not member.is_guest:
                    raise
                self._say(f"{error}; the run continues without this server")
                self._end(member)
                if not self._members:
                    raise InfrastructureError(
                        f"no server of this run is left; the last error: {error}"
                    ) from error

    def _ask(self, member: _Member) -> None:
        before = member.status
        try:
            status = member.status = member.handle.status()
        except SupervisorLost as error:
            self._replace(member, error)
            return
        if status.state == "failed":
            raise InfrastructureError(f"server {member.label} is lost permanently: {status.message}")
        if status.restarts > before.restarts:
            limit = self._rollout.max_server_restarts
            self._say(
                f"server {before.url}: {status.message.partition(chr(10))[0]}; restart {status.restarts} of "
                f"{limit}"
            )

    def _replace(self, lost: _Member, why: InfrastructureError) -> None:
        """Start a guest in the seat of a server whose supervisor is lost, perhaps with its machine.

        Because it is a guest, the run continues even if the machine never returns.

        Raises:
            InfrastructureError: the restarts of the whole fleet (`rollout.max_server_restarts` per started
                server) are used up.
        """
        if lost.seat is None or self._replacements_left == 0:
            raise InfrastructureError(
                f"server {lost.label} is lost ({why}), and rollout.max_server_restarts is used up"
            ) from why
        self._replacements_left -= 1
        self._members.remove(lost)
        lost.handle.stop()  # an unreachable supervisor may still be alive
        new = self._start(lost.seat, is_guest=True)
        self._say(f"server {lost.label} is lost ({why}); starting {new.label} to replace it")

    def mark_ready(self, urls: Sequence[str]) -> None:
        """Record that `urls` have the current weights."""
        for member in self._with(urls):
            member.handle.mark_ready(member.status.url)
        self.poll()

    def restart(self, url: str) -> None:
        """Kill a server that did not take its weights; its supervisor restarts it.

        An attached server is not killed: the run waits for it.
        """
        for member in self._with([url]):
            member.handle.restart(url)
        self.poll()

    def _with(self, urls: Sequence[str]) -> list[_Member]:
        return [m for m in self._members if m.status.url in urls]

    # --------------------------------------------------------------------------------------- joining, leaving

    def attach(self, url: str) -> str:
        """Attach to a running server during the run; return its URL.

        Raises:
            ConfigError: the server already belongs to this run, or its URL is refused.
        """
        if why := refuse_url(url, has_key=self._api_key is not None):
            raise ConfigError(why)
        if self._with([url.rstrip("/")]):
            raise ConfigError(f"{url} already serves this run")
        return self._attach(url, is_guest=True).label

    def start_another(self) -> str:
        """Start one more server of rollout.backend during the run; return its name.

        Raises:
            ConfigError: no GPU is free for it.
        """
        gpus = next((m.seat.num_gpus for m in self._members if m.seat is not None), 0.0)  # of each
        if self._free_seats:
            seat = self._free_seats.pop()
        elif gpus and ray.available_resources().get("GPU", 0.0) < gpus:
            raise ConfigError(
                f"no {gpus:g} GPU of this Ray is free for another server; drain one, or attach to a server "
                "that runs elsewhere"
            )
        else:
            seat = Seat(gpus)
        return self._start(seat, is_guest=True).label

    def leaving(self, url_or_name: str) -> str:
        """Return the URL of the server to be drained, its name if it has no URL yet.

        Raises:
            ConfigError: the run has no such server, or no other server is ready.
        """
        member = next(
            (m for m in self._members if url_or_name.rstrip("/") in (m.status.url, m.handle.name)), None
        )
        if member is None:
            raise ConfigError(
                f"{url_or_name} is not a server of this run; its servers: {', '.join(self.states)}"
            )
        if not [url for url in self.urls if url != member.status.url]:
            raise ConfigError(f"{url_or_name} cannot be removed: no other server is ready; add one first")
        return member.label

    def remove(self, label: str) -> None:
        """Remove a server without traffic. A started server is stopped; an attached one keeps running."""
        for member in [m for m in self._members if m.label == label]:
            self._end(member)

    def _end(self, member: _Member) -> None:
        self._members.remove(member)
        if member.seat is not None:
            self._free_seats.append(member.seat)
        member.handle.stop()

    # ---------------------------------------------------------------------------------------------------- end

    def pids(self) -> list[int]:
        """Return the process ids of the supervised servers."""
        return [m.status.pid for m in self._members if m.status.pid]

    def talk(
        self,
        urls: Sequence[str],
        script: Callable[[Sequence[SGLangClient]], Awaitable[T]],
        *,
        adapter: str | None = None,
    ) -> T:
        """Run `script(clients)` under trio, with a client for each URL that samples with `adapter`."""

        async def run() -> T:
            clients = self.clients(urls, adapter=adapter)
            try:
                return await script(clients)
            finally:
                for client in clients:
                    await client.aclose()

        return in_trio(run)

    def clients(self, urls: Sequence[str], *, adapter: str | None = None) -> list[SGLangClient]:
        """Return a client for each URL that samples with `adapter`; valid within one trio.run, and to be
        closed.
        """
        num_ids = num_ids_of(self._model)
        return [SGLangClient(url, api_key=self.key_of(url), adapter=adapter, num_ids=num_ids) for url in urls]

    def key_of(self, url: str) -> str | None:
        """Return the API key of the server at `url`.

        The key of started servers is sent to no other server.
        """
        return next((m.handle.api_key for m in self._members if m.status.url == url), self._api_key)

    def begin_close(self) -> None:
        """Begin `close` without waiting, so that several fleets stop at once."""
        for handle in self._handles:
            handle.begin_stop()

    def close(self) -> None:
        """Stop every server that this run started, and watch the attached ones no more."""
        self.begin_close()
        for handle in self._handles:
            handle.stop()
