"""`FrozenFleet`: the servers that a run starts for frozen models, opponents and a teacher.

They start, are watched and are restarted like the policy's (`ServerFleet`), but nobody publishes to them: a
server that generates has its weights, or loads the snapshot that its model was replaced by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ray import ObjectRef

from agentrl.cluster.pools import Seat
from agentrl.cluster.servers import ServerFleet, ServerLine
from agentrl.config.frozen_servers import FrozenPlan
from agentrl.servers.client import SGLangClient, for_each
from agentrl.servers.startup import Readiness


@dataclass(frozen=True, slots=True)
class PolicySnapshot:
    """A policy of this run that an opponent is replaced by: after `step`, as `version`."""

    folder: str
    step: int
    version: int


@dataclass(frozen=True, slots=True)
class _Load:
    """What the servers of a model must load. timeout_s: deadline of one of them; limit: its origin."""

    folder: str
    version: int
    timeout_s: float
    limit: str


class FrozenFleet:
    """A fleet for each plan; none if the run starts no such servers."""

    def __init__(
        self,
        fleets: Sequence[tuple[FrozenPlan, ServerFleet]] = (),
        *,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._fleets = fleets
        self._say = say
        self._loads: dict[str, _Load] = {}  # by config key of the model

    @classmethod
    def launch(
        cls,
        plans: Sequence[FrozenPlan],
        seats: Sequence[Seat],
        *,
        run_dir: Path,
        say: Callable[[str], None],
    ) -> FrozenFleet:
        """Launch the servers of all plans, each in a seat, in order; see `wait_until_ready`."""
        fleets, free = [], list(seats)
        for plan in plans:
            own, free = free[: plan.rollout.num_started], free[plan.rollout.num_started :]
            fleet = ServerFleet.launch(
                plan.rollout, plan.model, own, run_dir=run_dir, say=say, name=plan.name
            )
            fleets.append((plan, fleet))
        assert not free, "each seat has a server"
        return cls(fleets, say=say)

    @property
    def starting(self) -> Mapping[ObjectRef, float]:
        """The servers that do not generate yet, each with its deadline (monotonic clock, seconds)."""
        return {ref: deadline for fleet in self._all for ref, deadline in fleet.starting.items()}

    @property
    def readiness(self) -> Readiness:
        parts = [fleet.readiness for fleet in self._all]
        return Readiness(
            "frozen servers", sum(part.num_ready for part in parts), sum(part.num_parts for part in parts)
        )

    def wait_until_ready(self) -> None:
        """Wait until every server generates.

        Raises:
            InfrastructureError: a server did not start in `rollout.server_start_timeout_s`; the message ends
                with its log.
        """
        for fleet in self._all:
            fleet.wait_until_ready()

    def poll(self) -> None:
        """Poll every supervisor. A server that generates may be asked.

        Raises:
            InfrastructureError: a server used up its restarts.
        """
        for plan, fleet in self._fleets:
            fleet.poll()
            if up := fleet.urls_needing_weights:
                self._load(plan, fleet, up)

    def replace(self, key: str, snapshot: PolicySnapshot | None, *, timeout_s: float, limit: str) -> None:
        """Let the servers of a model load a snapshot, None: the weights that they were started with.

        Turns that run are interrupted, and sampled again by the new weights. A server that does not load them
        is restarted, and loads them then.
        """
        for plan, fleet in self._fleets:
            if plan.key == key:
                folder, version = (
                    (plan.model.path, 0) if snapshot is None else (snapshot.folder, snapshot.version)
                )
                self._loads[key] = _Load(folder, version, timeout_s, limit)
                self._load(plan, fleet, [*fleet.urls, *fleet.urls_needing_weights])

    def _load(self, plan: FrozenPlan, fleet: ServerFleet, urls: Sequence[str]) -> None:
        load, failed = self._loads.get(plan.key), {}
        if load is not None:
            failed = fleet.talk(urls, partial(_replace, load=load))
        for url, why in failed.items():
            self._say(f"server {url} of {plan.key} did not load {load and load.folder}: {why}; restarting it")
            fleet.restart(url)
        fleet.mark_ready([url for url in urls if url not in failed])

    @property
    def keys(self) -> dict[str, dict[str, str | None]]:
        """By config key of a model: URL -> API key of its servers that may be asked."""
        return {plan.key: {url: fleet.key_of(url) for url in fleet.urls} for plan, fleet in self._fleets}

    @property
    def lines(self) -> list[ServerLine]:
        """All servers, for display; `origin` is the name of their model."""
        return [replace(line, origin=plan.name) for plan, fleet in self._fleets for line in fleet.lines]

    def close(self) -> None:
        """Stop all servers."""
        for fleet in self._all:
            fleet.begin_close()
        for fleet in self._all:
            fleet.close()

    @property
    def _all(self) -> list[ServerFleet]:
        return [fleet for _, fleet in self._fleets]


async def _replace(servers: Sequence[SGLangClient], *, load: _Load) -> dict[str, str]:
    """Let servers load weights; return url -> reason for those that did not."""

    async def one(server: SGLangClient) -> None:
        await server.pause("abort")
        await server.update_weights_from_disk(load.folder, version=load.version, flush_cache=True)
        await server.resume()

    return await for_each(servers, one, timeout_s=load.timeout_s, limit=load.limit)
