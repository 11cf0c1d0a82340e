"""Seats of the ranks of a run: reserved by the pools of the config, and recorded by NVIDIA Nsight Systems if
wanted.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from agentrl.cluster.pools import Seat, reserve
from agentrl.config.placement import PlacementConfig, Role
from agentrl.config.profiler import NsightConfig
from agentrl.errors import ConfigError

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
                Seat(spot.num_gpus)
                if spot.bundle is None
                else Seat(spot.num_gpus, groups[spot.pool][spot.group], spot.bundle)
                for spot in spots
            ]
            for role, spots in seated.items()
        }


def check_nsight(config: NsightConfig) -> None:
    """Check that a requested profile can be recorded.

    Raises:
        ConfigError: the config needs `nsys`, which is not installed on this machine.
    """
    if config.roles and shutil.which("nsys") is None:
        raise ConfigError(
            "profiler.nsight needs the program nsys (NVIDIA Nsight Systems) on PATH; install it, or use "
            "profiler.nsight.roles=[]"
        )


def recorded(
    seats: Mapping[Role, Sequence[Seat]], config: NsightConfig, folder: Path
) -> dict[Role, Sequence[Seat]]:
    """Return the seats, with those of `config.roles` wrapped in nsys.

    Each wrapped process writes `<role>_<pid>.nsys-rep` to `folder` when it ends.
    """
    if config.roles:
        folder.mkdir(parents=True, exist_ok=True)
    # Ray starts a wrapped worker as `nsys ... python`. PATH makes that this interpreter, even without an
    # activated environment.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    place = str(folder.resolve()).replace(" ", r"\ ")  # a shell reads the command
    wrapped = {
        role: {"nsight": {**config.options, "o": f"{place}/{role}_%p"}, "env_vars": {"PATH": path}}
        for role in config.roles
    }
    return {
        role: [replace(seat, runtime_env=wrapped.get(role, {})) for seat in own]
        for role, own in seats.items()
    }
