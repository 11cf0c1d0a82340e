"""Reservation of nodes and GPUs with Ray's placement groups, and the seat of one rank in them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from agentrl.errors import ConfigError, InfrastructureError
from agentrl.types import Reservation


@dataclass(frozen=True, slots=True)
class Seat:
    """The resources that one rank requests from Ray.

    num_gpus: below 1 it shares a GPU with other ranks.
    group: placement group; None: any node.
    bundle: index in the group.
    runtime_env: of the rank's process, in Ray's format.
    """

    num_gpus: float = 0.0
    group: PlacementGroup | None = None
    bundle: int = 0
    runtime_env: Mapping[str, Any] = field(default_factory=dict)

    def ray_options(self) -> dict[str, Any]:
        """Return the options of Ray's `actor.options(...)` for this seat."""
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": self.num_gpus}
        if self.group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=self.bundle
            )
        return options | ({"runtime_env": dict(self.runtime_env)} if self.runtime_env else {})


def beside_driver() -> NodeAffinitySchedulingStrategy:
    """Return the scheduling strategy that places an actor on the driver's node.

    A run then depends on one node fewer.
    """
    # A soft affinity would move it if this node is busy.
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


@contextmanager
def reserve(
    pools: Mapping[str, Reservation], *, timeout_s: float
) -> Iterator[dict[str, list[PlacementGroup]]]:
    """Reserve the placement groups of each pool inside the block; no other pool can use their resources.

    Raises:
        ConfigError: the cluster's nodes could never provide them.
        InfrastructureError: the resources are in use and were not released within `timeout_s`.
    """
    for name, pool in pools.items():
        _refuse_impossible(name, pool)
    _refuse_too_many(pools)
    with ExitStack() as stack:
        found = {
            name: [_group(stack, bundles, pool.strategy) for bundles in pool.groups]
            for name, pool in pools.items()
        }
        deadline = time.monotonic() + timeout_s
        for name, groups in found.items():
            if not all(group.wait(max(0.0, deadline - time.monotonic())) for group in groups):
                raise InfrastructureError(
                    f"placement.pools.{name} waited {timeout_s:g} s for {_words(pools[name])}: other jobs "
                    f"use them; {_cluster()}"
                )
        yield found


def _group(stack: ExitStack, bundles: Sequence[Mapping[str, float]], strategy: str) -> PlacementGroup:
    group = placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
    stack.callback(remove_placement_group, group)
    return group


def _refuse_impossible(name: str, pool: Reservation) -> None:
    """Raise if empty nodes could not provide a resource, each kind on its own: waiting would be in vain."""
    for resource, amount in pool.groups[0][0].items():
        if pool.strategy == "STRICT_PACK":
            per_node = amount * len(pool.groups[0])
            room = sum(int(held / per_node) for held in _held(resource))
        else:
            room = sum(held >= amount for held in _held(resource)) // len(pool.groups[0])
        if room < len(pool.groups):
            raise ConfigError(f"placement.pools.{name} needs {_words(pool)}; {_cluster()}")


def _refuse_too_many(pools: Mapping[str, Reservation]) -> None:
    wanted = sum(
        bundle.get("GPU", 0.0) for pool in pools.values() for group in pool.groups for bundle in group
    )
    if wanted > sum(_held("GPU")):
        raise ConfigError(f"placement.pools {', '.join(pools)} need {wanted:g} GPUs in total; {_cluster()}")


def _held(resource: str) -> list[float]:
    """Return how much of a resource each node has, in use or not."""
    return [float(node["Resources"].get(resource, 0.0)) for node in ray.nodes() if node["Alive"]]


def _words(pool: Reservation) -> str:
    if pool.strategy == "STRICT_PACK":
        amounts = {resource: amount * len(pool.groups[0]) for resource, amount in pool.groups[0][0].items()}
        return f"{len(pool.groups)} node(s) with {_amounts(amounts)}"
    return f"{len(pool.groups[0])} node(s) with {_amounts(pool.groups[0][0])}"


def _amounts(amounts: Mapping[str, float]) -> str:
    return " and ".join(
        f"{amount:g} GPUs" if resource == "GPU" else f"the resource {resource}"
        for resource, amount in amounts.items()
    )


def _cluster() -> str:
    return f"the nodes of this Ray have {', '.join(f'{held:g}' for held in _held('GPU'))} GPUs"
