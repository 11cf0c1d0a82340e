"""Placement of each role's ranks on nodes and GPUs; impossible layouts are refused here.

A *pool* is a number of nodes with the same number of GPUs each. The ranks of a role in a pool are placed one
per GPU, from the first GPU on. Roles in one pool share its GPUs, in equal fractions of each. A server that is
alone in its pool may have several GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from agentrl.config.section import Section
from agentrl.types import Reservation

Role = Literal["actor", "critic", "reward_model", "servers", "frozen_servers"]
Device = Literal["cpu", "cuda"]

SERVER_ROLES: tuple[Role, ...] = ("servers", "frozen_servers")
"""Roles whose members are servers, not ranks: one may have several GPUs, or share one with others."""

_COUNT_KEYS: Mapping[Role, str] = {
    "servers": "rollout.num_servers",
    "frozen_servers": "the num_servers of opponents or teacher",
}
_SMALLEST_SHARE = 1e-4
"""Resolution of Ray's fractional GPUs."""
_TOKEN_AMOUNT = 1e-3
"""Amount of a resource that a rank requests only to be placed near it, without using it up."""


class PoolConfig(Section):
    """Nodes that one or more roles stand on."""

    nodes: int = Field(1, ge=1, description="Number of nodes, each with the same number of GPUs.")
    gpus_per_node: int = Field(0, ge=0, description="GPUs per node; 0: ranks compute on CPUs.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Device of the ranks; auto: cuda if the pool has GPUs."
    )
    node_resource: str | None = Field(
        None,
        description="Custom Ray resource of the nodes (`ray start --resources`), to select them; null: any "
        "nodes.",
    )

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def device_in_use(self) -> Device:
        """`device` with auto resolved."""
        return "cuda" if self.num_gpus > 0 else "cpu"

    @model_validator(mode="after")
    def _has_what_its_device_needs(self) -> PoolConfig:
        if self.device == "cuda" and self.gpus_per_node == 0:
            raise ValueError("device=cuda, but gpus_per_node=0; set gpus_per_node, or use device=cpu")
        if self.device == "cpu" and self.gpus_per_node > 0:
            raise ValueError(
                f"device=cpu would leave gpus_per_node={self.gpus_per_node} unused; use gpus_per_node=0, or "
                "device=cuda"
            )
        return self


class RolesConfig(Section):
    """The pool of each role."""

    actor: str | None = Field(
        None, description="Pool of the learner's ranks, policy and frozen reference; null: the only pool."
    )
    critic: str | None = Field(None, description="Pool of the critic's ranks; null: the actor's.")
    reward_model: str | None = Field(None, description="Pool of the reward model's ranks; null: the actor's.")
    servers: str | None = Field(None, description="Pool of the inference servers; null: the only pool.")
    frozen_servers: str | None = Field(
        None,
        description="Pool of the servers that the run starts for opponents and teachers; null: that of "
        "`servers`.",
    )


@dataclass(frozen=True, slots=True)
class Spot:
    """Place of one rank: a bundle in one of its pool's placement groups. `bundle` None: any node."""

    pool: str
    num_gpus: float
    group: int = 0
    bundle: int | None = None


@dataclass(frozen=True, slots=True)
class ResourceLayout:
    """Resources to request from Ray.

    Attributes:
        reservations: by pool; pools whose ranks may run anywhere have none.
        spots: by role, one per rank.
    """

    reservations: Mapping[str, Reservation]
    spots: Mapping[Role, tuple[Spot, ...]]


class PlacementConfig(Section):
    """Which pool of nodes each role stands in. Without pools, everything is on CPUs, wherever Ray puts it."""

    pools: dict[str, PoolConfig] = Field(
        {}, description="Name -> nodes and their GPUs; {}: one pool `main` without GPUs."
    )
    roles: RolesConfig = RolesConfig()

    @property
    def pools_in_use(self) -> Mapping[str, PoolConfig]:
        return self.pools or {"main": PoolConfig()}

    def pool_of(self, role: Role) -> str:
        """Return the name of a role's pool.

        Raises:
            ValueError: there are several pools, and the role names none.
        """
        named = getattr(self.roles, role)
        if named is not None:
            return str(named)
        if role in ("critic", "reward_model"):
            return self.pool_of("actor")
        if role == "frozen_servers":
            return self.pool_of("servers")
        if len(self.pools_in_use) > 1:
            raise ValueError(f"placement.roles.{role} names no pool; choose one of {_listed(self.pools)}")
        return next(iter(self.pools_in_use))

    def device_of(self, role: Role) -> Device:
        """Return the device on which the ranks of a role compute."""
        return self.pools_in_use[self.pool_of(role)].device_in_use

    def layout(self, num_ranks: Mapping[Role, int]) -> ResourceLayout:
        """Return the places of the ranks of the run's roles.

        Raises:
            ValueError: the ranks do not fit; one line with the numbers and a valid alternative.
        """
        members: dict[str, dict[Role, int]] = {name: {} for name in self.pools_in_use}
        for role, count in num_ranks.items():
            members[self.pool_of(role)][role] = count
        spots: dict[Role, tuple[Spot, ...]] = {}
        reservations: dict[str, Reservation] = {}
        for name, pool in self.pools_in_use.items():
            if not members[name]:
                raise ValueError(
                    f"placement.pools.{name} is used by no role; name it under placement.roles, or remove it"
                )
            if pool.num_gpus == 0:
                reservations |= {name: found} if (found := _reserve_nodes(pool)) else {}
                spots |= {role: _spread(name, pool, count) for role, count in members[name].items()}
            else:
                gpus_per_bundle = _gpus_per_bundle(name, pool, members[name])
                reservations[name] = _reserve_gpus(pool, gpus_per_bundle)
                spots |= _share(name, pool, members[name], gpus_per_bundle)
        return ResourceLayout(reservations, spots)

    @model_validator(mode="after")
    def _names_pools_that_exist(self) -> PlacementConfig:
        for role, name in self.roles.model_dump().items():
            if name is not None and name not in self.pools_in_use:
                raise ValueError(
                    f"roles.{role}={name} is not a pool; available: {_listed(self.pools_in_use)}"
                )
        return self


def _gpus_per_bundle(name: str, pool: PoolConfig, members: Mapping[Role, int]) -> int:
    """Return the number of GPUs per bundle.

    It is 1, except for servers of one role alone in their pool, which divide all GPUs evenly.
    """
    where = f"placement.pools.{name} ({_size(pool)})"
    (role, count), *others = members.items()
    if not others and role in SERVER_ROLES and count < pool.num_gpus:
        size, rest = divmod(pool.num_gpus, count)
        if rest or pool.gpus_per_node % size:
            raise ValueError(
                f"{where}: {count} servers cannot get the same number of GPUs of one node; change "
                f"{_COUNT_KEYS[role]}"
            )
        return size
    for role, count in members.items():
        if role not in SERVER_ROLES and count > pool.num_gpus:
            raise ValueError(
                f"{where}: {count} ranks of {role} need one GPU each; raise nodes or gpus_per_node, or start "
                "fewer ranks"
            )
        if role in SERVER_ROLES and count > pool.num_gpus and count % pool.num_gpus:
            raise ValueError(
                f"{where}: {count} servers cannot share its GPUs evenly; change {_COUNT_KEYS[role]}"
            )
    if max(members.values()) < pool.num_gpus:
        largest = max(members, key=members.__getitem__)
        raise ValueError(
            f"{where}: its largest role, {largest}, uses {members[largest]} of them; the other GPUs would be "
            "idle"
        )
    return 1


def _reserve_gpus(pool: PoolConfig, gpus_per_bundle: int) -> Reservation:
    """Return one placement group per node.

    A bundle has the GPUs that one rank sees, or that ranks of several roles share.
    """
    bundle = {"GPU": float(gpus_per_bundle)} | (
        {} if pool.node_resource is None else {pool.node_resource: _TOKEN_AMOUNT}
    )
    return Reservation(((bundle,) * (pool.gpus_per_node // gpus_per_bundle),) * pool.nodes, "STRICT_PACK")


def _reserve_nodes(pool: PoolConfig) -> Reservation | None:
    """Return one placement group with a bundle on each node; None if any node is suitable."""
    if pool.nodes == 1 and pool.node_resource is None:
        return None
    return Reservation((({pool.node_resource or "CPU": _TOKEN_AMOUNT},) * pool.nodes,), "STRICT_SPREAD")


def _spread(name: str, pool: PoolConfig, count: int) -> tuple[Spot, ...]:
    """Return places without GPUs: neighbouring ranks on the same node, evenly divided over the nodes."""
    if _reserve_nodes(pool) is None:
        return (Spot(name, 0.0),) * count
    return tuple(Spot(name, 0.0, 0, rank * pool.nodes // count) for rank in range(count))


def _share(
    name: str, pool: PoolConfig, members: Mapping[Role, int], gpus_per_bundle: int
) -> dict[Role, tuple[Spot, ...]]:
    num_bundles = pool.num_gpus // gpus_per_bundle
    per_node = pool.gpus_per_node // gpus_per_bundle
    occupants = Counter(rank % num_bundles for count in members.values() for rank in range(count))

    def spot(bundle: int) -> Spot:
        # Rounded down, because the shares of one GPU must not add up to more than 1.
        share = (
            gpus_per_bundle
            if occupants[bundle] == 1
            else int(1 / occupants[bundle] / _SMALLEST_SHARE) * _SMALLEST_SHARE
        )
        return Spot(name, round(float(share), 4), bundle // per_node, bundle % per_node)

    return {role: tuple(spot(rank % num_bundles) for rank in range(count)) for role, count in members.items()}


def _size(pool: PoolConfig) -> str:
    return (
        f"{pool.nodes} node{'s' * (pool.nodes > 1)} x {pool.gpus_per_node} "
        f"GPU{'s' * (pool.gpus_per_node > 1)}"
    )


def _listed(names: Mapping[str, PoolConfig]) -> str:
    return ", ".join(sorted(names))
