"""One process per rank: device, threads, the default process group, and exact reductions over it."""

from __future__ import annotations

import ctypes
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from agentrl.config.learner import LearnerConfig
from agentrl.errors import ConfigError, LearnerError
from agentrl.learner.sharding import TENSOR, open_expert_mesh, open_mesh, open_tensor_mesh, without_last

SAVING = "saving"
"""Thread of a rank that waits for a checkpoint to be written."""

_data_group: ProcessGroup | None = None
"""Process-wide, like torch's default group. Sums are over this group.

It contains one rank of each set of ranks that share their microbatches, so that each microbatch counts once.
None: all ranks.
"""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_NEVER_BYTES = 2**31 - 1

Device = Literal["auto", "cpu", "cuda"]
"""auto: a GPU if torch sees one."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Rank, device and process groups of this process.

    mesh: FSDP shards weights and averages gradients over it.
    sequence_group: the ranks that share this rank's microbatches, each with a part of the tokens; None: not
    shared.
    tensor_mesh: the ranks that share this rank's microbatches, each with a part of the matrices; None: not
    shared.
    expert_mesh: all ranks; experts are divided over its last dimension (see `open_expert_mesh`). None: they
    are not divided.
    """

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    sequence_group: ProcessGroup | None = None
    tensor_mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def join_ranks(
    config: LearnerConfig, *, rank: int, address: str, port: int, on: Device = "auto"
) -> RankPlace:
    """Form the default process group; blocks until all `config.world_size` ranks have joined at address:port.

    Raises:
        ConfigError: `cuda` is requested, and there is no GPU.
        LearnerError: the other ranks did not join within `learner.collective_timeout_s`.
    """
    device = _device(on, rank)
    torch.set_num_threads(config.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    try:
        dist.init_process_group(
            # On a GPU both gloo and nccl: counts, metrics and checkpoint plans are on the CPU.
            backend="gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=f"tcp://{address}:{port}",
            rank=rank,
            world_size=config.world_size,
            timeout=timedelta(seconds=config.collective_timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        raise LearnerError(
            f"rank {rank} of {config.world_size} could not join the others at {address}:{port}: {error}"
        ) from error
    _count_replicas_once(config)
    shard_size, tensor_mesh = config.fsdp.shard_size, None
    if config.tensor_parallel == 1:
        mesh = open_mesh(device.type, world_size=config.world_size, shard_size=shard_size)
    else:
        both = open_tensor_mesh(
            device.type,
            world_size=config.world_size,
            shard_size=shard_size,
            tensor_parallel=config.tensor_parallel,
        )
        mesh, tensor_mesh = without_last(both), both[TENSOR]
    expert_mesh = _expert_mesh(config, device) if config.expert_parallel > 1 else None
    return RankPlace(rank, config.world_size, device, mesh, _sequence_group(config), tensor_mesh, expert_mesh)


def _sequence_group(config: LearnerConfig) -> ProcessGroup | None:
    """Form the groups in which each rank has a part of the tokens. A collective.

    Neighboring ranks split the matrices; the members of a group have the same part of them.
    """
    step, size = config.tensor_parallel, config.num_replicas
    if config.sequence_parallel == 1:
        return None
    group, _ = dist.new_subgroups_by_enumeration(
        [
            list(range(first + part, first + size, step))
            for first in range(0, config.world_size, size)
            for part in range(step)
        ]
    )
    return group


def _expert_mesh(config: LearnerConfig, device: torch.device) -> DeviceMesh:
    return open_expert_mesh(
        device.type,
        world_size=config.world_size,
        shard_size=config.fsdp.shard_size,
        expert_parallel=config.expert_parallel,
    )


def leave_ranks() -> None:
    """Leave the default process group."""
    global _data_group
    _data_group = None
    dist.destroy_process_group()


def add_over_ranks(values: Mapping[str, float]) -> dict[str, float]:
    """Return each value summed over all ranks, in float64. A collective: every rank passes the same names.

    Ranks that share their microbatches must pass the same values, which count once.
    """
    return _reduce(values, dist.ReduceOp.SUM, _data_group)


def largest_over_ranks(values: Mapping[str, float]) -> dict[str, float]:
    """Return the maximum of each value over all ranks; NaN counts as infinite. A collective."""
    return _reduce({name: math.inf if math.isnan(v) else v for name, v in values.items()}, dist.ReduceOp.MAX)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return f64 of any shape, the same on every rank, summed like `add_over_ranks`, on the CPU. A
    collective.
    """
    total = values.detach().cpu().double().clone()
    dist.all_reduce(total, group=_data_group)
    return total


def gather_over_ranks(values: Tensor) -> Tensor:
    """Return the values of all ranks (f64[n], n may differ), in rank order, on the CPU. A collective.

    Of ranks that share their microbatches, only one counts.
    """
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(_data_group))]
    dist.all_gather(counts, torch.tensor([len(values)]), group=_data_group)
    longest = max(int(count) for count in counts)
    padded = torch.zeros(longest, dtype=torch.float64)
    padded[: len(values)] = values
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded, group=_data_group)
    return torch.cat([own[: int(count)] for own, count in zip(gathered, counts, strict=True)])


def _count_replicas_once(config: LearnerConfig) -> None:
    """Form the groups in which each microbatch counts once. A collective.

    Neighboring ranks share microbatches.
    """
    global _data_group
    size = config.num_replicas
    if size > 1:
        _data_group, _ = dist.new_subgroups_by_enumeration(
            [list(range(index, config.world_size, size)) for index in range(size)]
        )


def _reduce(
    values: Mapping[str, float], operation: dist.ReduceOp.RedOpType, group: ProcessGroup | None = None
) -> dict[str, float]:
    names = sorted(values)
    tensor = torch.tensor([values[name] for name in names], dtype=torch.float64)
    dist.all_reduce(tensor, op=operation, group=group)
    return dict(zip(names, tensor.tolist(), strict=True))


def _device(requested: str, rank: int) -> torch.device:
    if requested == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "the rank's pool has GPUs, but torch finds none on this machine; give the role a pool with "
            "gpus_per_node=0 (placement.pools)"
        )
    if requested == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    # Ray makes only the rank's own GPU visible, as number 0. Ranks started by hand share all GPUs of the
    # host.
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def give_back_memory(place: RankPlace) -> None:
    """Free GPU memory that torch keeps for later allocations; other processes on the GPU cannot use it."""
    if place.device.type == "cuda":
        torch.cuda.empty_cache()


def keep_freed_memory() -> None:
    """Let this process keep freed memory for its next allocations; its computation repeats.

    By default glibc returns every block above 32 MiB to the kernel when it is freed, and the kernel zeroes
    each page when it is allocated again. This takes a quarter of an update with large microbatches. No effect
    with another C library.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _NEVER_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER_BYTES)
