"""Reserves the seats of all ranks for a run, by the pools of the config."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from agentrl.config.placement import PlacementConfig, Role
from agentrl.workers.pools import Seat, reserve

RESERVE_TIMEOUT_S = 120.0
"""How long to wait for GPUs that another run on the cluster still has."""


@contextmanager
def reserve_seats(
    placement: PlacementConfig, num_ranks: Mapping[Role, int], *, roles: Collection[Role] | None = None
) -> Iterator[dict[Role, Sequence[Seat]]]:
    """Yield the seats of each role, in order of rank, and release them afterwards.

    Args:
        num_ranks: of every role; all are needed for the layout, because roles share pools.
        roles: reserve seats for these only; None: all.

    Raises:
        ConfigError: the pools do not fit on the nodes of this Ray.
        InfrastructureError: the resources are in use by others.
    """
    layout = placement.layout(num_ranks)
    seated = {role: spots for role, spots in layout.spots.items() if roles is None or role in roles}
    pools = {spot.pool for spots in seated.values() for spot in spots}
    wanted = {name: reservation for name, reservation in layout.reservations.items() if name in pools}
    with reserve(wanted, timeout_s=RESERVE_TIMEOUT_S) as groups:
        yield {
            role: [
                Seat(spot.num_gpus) if spot.bundle is None else Seat(spot.num_gpus, groups[spot.pool][spot.group], spot.bundle)
                for spot in spots
            ]
            for role, spots in seated.items()
        }
