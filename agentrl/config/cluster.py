"""Config of Ray, and a check that the pools of a run fit the cluster."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, model_validator

from agentrl.config.placement import PlacementConfig, Role
from agentrl.config.section import Section

MIN_OBJECT_STORE_BYTES = 80_000_000
"""Ray requires at least 75 MiB."""


class ClusterConfig(Section):
    """Ray."""

    address: str | None = Field(
        None, description="None: start Ray on this machine; `auto` or an address joins a cluster."
    )
    num_nodes: int | None = Field(
        None, ge=1, description="Number of nodes to wait for in a joined cluster; None: do not wait."
    )
    num_cpus: int | None = Field(
        None,
        ge=1,
        description="CPUs of a Ray that the run starts; None: what CPU affinity, control groups and SLURM "
        "grant, not all of the machine's.",
    )
    object_store_bytes: int | None = Field(
        None,
        ge=MIN_OBJECT_STORE_BYTES,
        description="Object store size of a Ray that the run starts; None: Ray's default share of the "
        "machine's memory, or of the granted memory if that is less.",
    )
    gpu_memory_gb: float | None = Field(
        None,
        gt=0,
        description="Memory of one GPU in GB (10^9 bytes), such as 80: a run that cannot fit is refused "
        "before it starts, and `agentrl config explain` says why. None: not checked.",
    )
    niceness: int = Field(
        0,
        ge=0,
        le=19,
        description="Niceness of the run's processes in a Ray that the run starts, added to that of the "
        "command. 0: on a busy machine they get the same share of the CPU as other programs; Ray's own "
        "default is 15, a thirtieth of that share.",
    )

    @model_validator(mode="after")
    def _waits_for_nodes_of_a_cluster(self) -> ClusterConfig:
        if self.num_nodes is not None and self.address is None:
            raise ValueError(
                f"num_nodes={self.num_nodes}, but a Ray started on this machine has one node; set "
                "cluster.address to join a cluster"
            )
        return self


def refuse_impossible_layout(
    placement: PlacementConfig, num_ranks: Mapping[Role, int], cluster: ClusterConfig
) -> None:
    """Check that the ranks of each role fit its pool, and that Ray can provide the nodes of the pools.

    Raises:
        ValueError: the ranks do not fit, or a pool has several nodes although Ray is started on this machine
            alone.
    """
    placement.layout(num_ranks)
    for name, pool in placement.pools.items():
        if pool.nodes > 1 and cluster.address is None:
            raise ValueError(
                f"placement.pools.{name}.nodes={pool.nodes}, but a Ray started on this machine "
                "has one node; set cluster.address to join a cluster"
            )
