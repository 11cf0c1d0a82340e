"""From the config's pools to the seats of ranks: reserved for the length of a run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from agentrl.config.placement import PlacementConfig, Role
from agentrl.workers.pools import Seat, reserve

RESERVE_TIMEOUT_S = 120.0
"""How long GPUs are waited for that another run of the same cluster still holds."""


@contextmanager
def reserve_seats(
    placement: PlacementConfig, num_ranks: Mapping[Role, int], *, roles: Collection[Role] | None = None
) -> Iterator[dict[Role, Sequence[Seat]]]:
    """Yield the seats of each role, in order of rank; they are given back afterwards.

    Args:
        num_ranks: of all roles, which share pools.
        roles: those that need their seats, of the others nothing is reserved; None: all.

    Raises:
        ConfigError: the nodes of this Ray cannot hold the pools.
        InfrastructureError: others hold what is needed.
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
