"""Explain in words where the roles of a run are placed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agentrl.config.placement import PlacementConfig, Role


def placement_lines(placement: PlacementConfig, num_ranks: Mapping[Role, int]) -> Iterator[tuple[str, str]]:
    """Yield a line per pool: its nodes, and the number of
    ranks of each role with the GPU share of one rank.
    """
    layout = placement.layout(num_ranks)
    for name, pool in placement.pools_in_use.items():
        nodes = f"{pool.nodes} node{'s' * (pool.nodes > 1)}, " if name in layout.reservations else ""
        size = f"{nodes}{pool.gpus_per_node} GPU{'s' * (pool.gpus_per_node > 1)} each" if pool.gpus_per_node else f"{nodes}no GPU"
        members = [
            f"{len(spots)} x {role}" + (f" at {spots[0].num_gpus:g} GPU" if spots[0].num_gpus else "")
            for role, spots in layout.spots.items()
            if spots[0].pool == name
        ]
        yield f"pool {name}", f"{size}: {', '.join(members)}"
