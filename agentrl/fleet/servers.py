"""`ServerFleet`: the inference servers of a run, each supervised by a Ray actor or attached by URL.

A *guest* is a server that joined during the run. Losing a guest is reported and the run continues; losing any
other server for good ends the run. If a supervisor is lost, for example with its machine, a guest is started
in its seat; Ray places it as soon as resources are free.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import ray
from ray import ObjectRef

from agentrl.config.model import ModelConfig
from agentrl.config.rollout import RolloutConfig, refuse_url
from agentrl.errors import AgentRLError, ConfigError, InfrastructureError
from agentrl.rollout.limits import key_of_started, num_ids_of, server_key
from agentrl.rollout.trio_run import in_trio
from agentrl.serving.attached import AttachedServer
from agentrl.serving.health import ServerKind, ServerStatus
from agentrl.serving.launch import launcher
from agentrl.serving.supervisor import Supervisor
from agentrl.sglang.client import SGLangClient
from agentrl.workers.actors import Actor, ActorKind, get
from agentrl.workers.pools import Seat
from agentrl.workers.starting import Readiness, num_done

POLL_TIMEOUT_S = 30.0
SUPERVISOR_START_S = 300.0
"""On top of `rollout.server_start_timeout_s`, which the supervisor enforces: ends supervisors that hang."""
UNPUBLISHED = "default"
"""Version of a server before its first publish; the client refuses tokens that carry it."""

T = TypeVar("T")

# Several threads: `status` and `stop` must be answered while `start` waits for the model to load.
SERVER = ActorKind("ServerActor", "a server's supervisor", POLL_TIMEOUT_S, num_threads=4)


def supervisor(rollout: RolloutConfig, model: ModelConfig, log_file: Path, *, api_key: str, is_open: bool) -> Supervisor:
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


@dataclass
class _Member:
    """A server and its last known status.

    watch: its Supervisor; for an attached server, the object that polls it from here.
    deadline: of its start, on the monotonic clock.
    starting: the pending result of its start; None once that has ended.
    """

    name: str
    watch: Actor[Supervisor] | AttachedServer
    status: ServerStatus
    deadline: float
    is_guest: bool = False
    starting: ObjectRef | None = None
    seat: Seat | None = None

    @property
    def label(self) -> str:
        return self.status.url or self.name

    @property
    def origin(self) -> Literal["started", "attached"]:
        return "attached" if isinstance(self.watch, AttachedServer) else "started"


@dataclass(frozen=True, slots=True)
class ServerLine:
    """A server as `agentrl servers list` shows it."""

    name: str
    url: str
    origin: str
    kind: str
    state: str
    restarts: int
    message: str


class ServerFleet:
    """All servers of a run. `urls` are the servers with the current weights, which may take traffic."""

    def __init__(self, rollout: RolloutConfig, model: ModelConfig, *, run_dir: Path, say: Callable[[str], None]) -> None:
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
        cls, rollout: RolloutConfig, model: ModelConfig, seats: Sequence[Seat], *, run_dir: Path, say: Callable[[str], None]
    ) -> ServerFleet:
        """Launch a server in every seat and attach to rollout.urls; see `wait_until_ready`.

        Raises:
            ConfigError: the key of the servers is missing.
        """
        fleet = cls(rollout, model, run_dir=run_dir, say=say)
        for seat in seats:
            fleet._start(seat)
        for url in rollout.urls:
            fleet._attach(url)
        return fleet

    def _attach(self, url: str, *, is_guest: bool = False) -> _Member:
        rollout = self._rollout
        watch = AttachedServer(
            url,
            start_timeout_s=rollout.server_start_timeout_s,
            hang_timeout_s=rollout.server_hang_timeout_s,
            max_restarts=rollout.max_server_restarts,
            api_key=self._api_key,
        )
        watch.start()
        member = _Member(watch.status().url, watch, watch.status(), self._start_deadline(), is_guest)
        self._members.append(member)
        return member

    def _start(self, seat: Seat, *, is_guest: bool = False) -> _Member:
        name = f"server_{self._num_started}"
        self._num_started += 1
        log_file, is_open = self._run_dir / "servers" / f"{name}.log", self._listens_to_the_network()
        options = seat.ray_options()
        watch = SERVER.launch(options, supervisor, self._rollout, self._model, log_file, api_key=self._key_of_started, is_open=is_open)
        status = ServerStatus("", "starting", self._rollout.backend)
        starting = watch.begin(Supervisor.start, self._model.path, UNPUBLISHED)
        member = _Member(name, watch, status, self._start_deadline(), is_guest, starting, seat)
        self._members.append(member)
        return member

    def _start_deadline(self) -> float:
        return time.monotonic() + self._rollout.server_start_timeout_s + SUPERVISOR_START_S

    def _listens_to_the_network(self) -> bool:
        """Return whether servers must be reachable from other machines.

        They must if Ray has several nodes: agents and learner may run on any of them.
        """
        machines = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        self._is_open |= len(machines) > 1  # sticky: a lost machine may return
        return self._is_open

    # ---------------------------------------------------------------------------------------------------- start-up

    @property
    def starting(self) -> Mapping[ObjectRef, float]:
        """The started servers that do not generate yet, each with its deadline (monotonic clock, seconds)."""
        return {m.starting: m.deadline for m in self._members if m.starting is not None}

    @property
    def readiness(self) -> Readiness:
        members = list(self._members)
        attached = [m.watch.status().state for m in members if isinstance(m.watch, AttachedServer)]
        refs = [m.starting for m in members if m.starting is not None]
        num_waited = len(refs) - num_done(refs) + sum(state in ("starting", "failed") for state in attached)
        return Readiness("servers", len(members) - num_waited, len(members), may_come="starting" in attached)

    def wait_until_attached(self) -> list[str]:
        """Wait until every server of rollout.urls generates; return their URLs.

        Raises ServerError on a timeout.
        """
        return [m.watch.wait_until_up() for m in self._members if isinstance(m.watch, AttachedServer)]

    def wait_until_ready(self) -> None:
        """Wait until every server generates. None may take traffic before the first publish.

        Raises:
            InfrastructureError: a server did not start in `rollout.server_start_timeout_s`; the message ends
                with its log.
        """
        deadline = max((m.deadline for m in self._members), default=0.0)
        get(list(self.starting), timeout_s=max(0.0, deadline - time.monotonic()), who=SERVER.who)
        for member in self._members:
            member.starting = None
        self.wait_until_attached()
        self.poll()

    # ------------------------------------------------------------------------------------------------------- state

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
        return [
            ServerLine(m.name, m.status.url, m.origin, m.status.kind or "unknown", m.status.state, m.status.restarts, m.status.message)
            for m in self._members
        ]

    def kind_of(self, url: str) -> ServerKind:
        """Return the kind of server at `url`; `rollout.backend` if the server did not report its kind."""
        return next((m.status.kind for m in self._members if m.status.url == url and m.status.kind), self._rollout.backend)

    def has_restarted(self, url: str) -> bool:
        return any(m.status.url == url and m.status.restarts for m in self._members)

    def poll(self) -> None:
        """Poll every supervisor. A lost guest is reported and removed.

        Raises:
            InfrastructureError: a server that is no guest used up its restarts, or no server is left.
        """
        for member in list(self._members):
            try:
                self._ask(member)
            except InfrastructureError as error:
                if not member.is_guest:
                    raise
                self._say(f"{error}; the run goes on without it")
                self._end(member)
                if not self._members:
                    raise InfrastructureError(f"no server of this run is left; the last one: {error}") from error

    def _ask(self, member: _Member) -> None:
        if member.starting is not None and not _is_done(member.starting):
            if time.monotonic() > member.deadline:
                raise InfrastructureError(f"server {member.label} did not start: nothing is free for it, or its machine hangs")
            return
        member.starting = None
        before, watch = member.status, member.watch
        if isinstance(watch, AttachedServer):
            member.status = watch.status()
        else:
            try:
                member.status = watch.run(Supervisor.status)
            except InfrastructureError as error:
                self._replace(member, error)
                return
        status = member.status
        if status.state == "failed":
            raise InfrastructureError(f"server {member.label} is lost for good: {status.message}")
        if status.restarts > before.restarts:
            limit = self._rollout.max_server_restarts
            self._say(f"server {before.url}: {status.message.partition(chr(10))[0]}; restart {status.restarts} of {limit}")

    def _replace(self, lost: _Member, why: InfrastructureError) -> None:
        """Start a guest in the seat of a server whose supervisor is lost, perhaps with its machine.

        Because it is a guest, the run continues even if the machine never returns.

        Raises:
            InfrastructureError: the restarts of the whole fleet (`rollout.max_server_restarts` per started
                server) are used up.
        """
        if lost.seat is None or self._replacements_left == 0:
            raise InfrastructureError(f"server {lost.label} is lost ({why}), and rollout.max_server_restarts is used up") from why
        self._replacements_left -= 1
        self._members.remove(lost)
        _stop([lost])  # an unreachable supervisor may still be alive
        new = self._start(lost.seat, is_guest=True)
        self._say(f"server {lost.label} is lost ({why}); {new.name} is started in its place")

    def mark_ready(self, urls: Sequence[str]) -> None:
        """Record that `urls` have the current weights."""
        for member in self._with(urls):
            if isinstance(member.watch, AttachedServer):
                member.watch.mark_ready(member.status.url)
            else:
                with suppress(InfrastructureError):  # `poll` handles a lost supervisor
                    member.watch.run(Supervisor.mark_ready, member.status.url)
        self.poll()

    def restart(self, url: str) -> None:
        """Kill a server that did not take its weights; its supervisor restarts it.

        An attached server is not killed: the run waits for it.
        """
        for member in self._with([url]):
            if isinstance(member.watch, AttachedServer):
                member.watch.restart(url)
            else:
                with suppress(InfrastructureError):
                    member.watch.run(Supervisor.restart, url)
        self.poll()

    def _with(self, urls: Sequence[str]) -> list[_Member]:
        return [m for m in self._members if m.status.url in urls]

    # -------------------------------------------------------------------------------------------- joining, leaving

    def attach(self, url: str) -> str:
        """Attach to a running server during the run; return its URL.

        Raises:
            ConfigError: the server already belongs to this run, or its URL is refused.
        """
        if why := refuse_url(url, has_key=self._api_key is not None):
            raise ConfigError(why)
        if self._with([url.rstrip("/")]):
            raise ConfigError(f"{url} serves this run already")
        return self._attach(url, is_guest=True).label

    def start_another(self) -> str:
        """Start one more server of rollout.backend during the run; return its name.

        Raises:
            ConfigError: no GPU is free for it.
        """
        gpus = self._rollout_gpus
        if self._free_seats:
            seat = self._free_seats.pop()
        elif gpus and ray.available_resources().get("GPU", 0.0) < gpus:
            raise ConfigError(f"no {gpus:g} GPU of this Ray is free for another server; drain one, or attach to one that runs elsewhere")
        else:
            seat = Seat(gpus)
        return self._start(seat, is_guest=True).name

    @property
    def _rollout_gpus(self) -> float:
        """GPUs of each started server."""
        return next((m.seat.num_gpus for m in self._members if m.seat is not None), 0.0)

    def leaving(self, url_or_name: str) -> str:
        """Return the URL of the server to be drained, its name if it has no URL yet.

        Raises:
            ConfigError: the run has no such server, or no other server is ready.
        """
        member = next((m for m in self._members if url_or_name.rstrip("/") in (m.status.url, m.name)), None)
        if member is None:
            raise ConfigError(f"{url_or_name} is no server of this run; there are: {', '.join(self.states)}")
        if not [url for url in self.urls if url != member.status.url]:
            raise ConfigError(f"{url_or_name} cannot leave: no other server is ready; add one first")
        return member.label

    def remove(self, label: str) -> None:
        """Remove a server without traffic. A started server is stopped; an attached one keeps running."""
        for member in [m for m in self._members if m.label == label]:
            self._end(member)

    def _end(self, member: _Member) -> None:
        self._members.remove(member)
        if member.seat is not None:
            self._free_seats.append(member.seat)
        _stop([member])

    # --------------------------------------------------------------------------------------------------------- end

    def pids(self) -> list[int]:
        """Return the process ids of the supervised servers."""
        return [m.status.pid for m in self._members if m.status.pid]

    def talk(self, urls: Sequence[str], script: Callable[[Sequence[SGLangClient]], Awaitable[T]], *, adapter: str | None = None) -> T:
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
        """Return a client for each URL that samples with `adapter`; valid within one trio.run, and to be closed."""
        num_ids = num_ids_of(self._model)
        return [SGLangClient(url, api_key=self.key_of(url), adapter=adapter, num_ids=num_ids) for url in urls]

    def key_of(self, url: str) -> str | None:
        """Return the API key of the server at `url`.

        The key of started servers is sent to no other server.
        """
        is_started = any(m.status.url == url and m.origin == "started" for m in self._members)
        return self._key_of_started if is_started else self._api_key

    def close(self) -> None:
        """Stop every server that this run started."""
        _stop(self._members)


def _stop(members: Sequence[_Member]) -> None:
    actors = [m.watch for m in members if not isinstance(m.watch, AttachedServer)]
    with suppress(AgentRLError):  # the server of a dead actor died with it
        get([actor.begin(Supervisor.stop) for actor in actors], timeout_s=SERVER.timeout_s, who=SERVER.who)
    for actor in actors:
        actor.kill()
    for member in members:
        if isinstance(member.watch, AttachedServer):
            member.watch.stop()


def _is_done(ref: ObjectRef) -> bool:
    return bool(ray.wait([ref], timeout=0, fetch_local=False)[0])
