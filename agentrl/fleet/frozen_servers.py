"""`FrozenFleet`: the servers that a run starts for frozen models, opponents and a teacher.

They start, are watched and are restarted like the policy's (`ServerFleet`), but nobody publishes to them: a
server that generates has its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ray import ObjectRef

from agentrl.config.frozen_servers import FrozenPlan
from agentrl.fleet.servers import ServerFleet, ServerLine
from agentrl.workers.pools import Seat
from agentrl.workers.readiness import Readiness


class FrozenFleet:
    """A fleet for each plan; none if the run starts no such servers."""

    def __init__(self, fleets: Sequence[tuple[FrozenPlan, ServerFleet]] = ()) -> None:
        self._fleets = fleets

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
        return cls(fleets)

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
        for fleet in self._all:
            fleet.poll()
            if up := fleet.urls_needing_weights:
                fleet.mark_ready(up)

    @property
    def keys(self) -> dict[str, dict[str, str | None]]:
        """By config key of a model: URL -> API key of its servers that may be asked."""
        return {plan.key: {url: fleet.key_of(url) for url in fleet.urls} for plan, fleet in self._fleets}

    @property
    def lines(self) -> list[ServerLine]:
        """All servers, for display; `origin` is the name of their model."""
        return [replace(line, origin=plan.name) for plan, fleet in self._fleets for line in fleet.lines]

    def pids(self) -> list[int]:
        """Return the process ids of the servers."""
        return [pid for fleet in self._all for pid in fleet.pids()]

    def close(self) -> None:
        """Stop all servers."""
        for fleet in self._all:
            fleet.begin_close()
        for fleet in self._all:
            fleet.close()

    @property
    def _all(self) -> list[ServerFleet]:
        return [fleet for _, fleet in self._fleets]
