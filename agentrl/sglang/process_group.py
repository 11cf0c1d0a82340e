"""The torch process group between the learner (rank 0) and the servers: the second wire of SGLang's protocol.

It is a group of its own beside (or without) the default group of the process, as a server forms it: rendezvous at rank 0's address,
keys under the group's name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, rendezvous
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

from agentrl.errors import InfrastructureError


def join_weights_group(*, address: str, port: int, rank: int, world_size: int, name: str, backend: str, timeout_s: float) -> ProcessGroup:
    """Join the group `name` of `world_size` members; blocks until rank 0 listens on address:port and all have come.

    Raises:
        InfrastructureError: they did not come within `timeout_s`, or the group could not be formed.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        store, rank, world_size = next(rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=timeout))
        store.set_timeout(timeout)
        group, _ = _new_process_group_helper(
            world_size,
            rank,
            [],
            backend,
            PrefixStore(name, store),
            group_name=name,  # type: ignore[arg-type]  # torch's own NewType, absent in older versions
            timeout=timeout,
        )
    except (RuntimeError, ValueError, OSError) as error:  # torch's DistError is a RuntimeError
        raise InfrastructureError(
            f"rank {rank} could not join the weights group {name!r} of {world_size} members at {address}:{port}: {error}"
        ) from error
    _world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


def leave_weights_group(group: ProcessGroup) -> None:
    """Leave the group; it cannot be used again, its name can."""
    dist.destroy_process_group(group)


def broadcast(tensor: Tensor, group: ProcessGroup, src: int = 0) -> None:
    """Send `tensor` (rank `src`) or receive into it (all others), in place.

    Raises:
        InfrastructureError: a member is gone, or the group's time-out passed.
    """
    try:
        dist.broadcast(tensor, src=src, group=group)
    except RuntimeError as error:
        raise InfrastructureError(f"broadcast in the weights group failed: {error}") from error


class Broadcast:
    """A broadcast under way from this rank; the tensor must not change before `wait` returned."""

    def __init__(self, tensor: Tensor, group: ProcessGroup, src: int = 0) -> None:
        self._tensor = tensor
        self._error: RuntimeError | None = None
        try:
            self._work = dist.broadcast(tensor, src=src, group=group, async_op=True)
        except RuntimeError as error:  # raised where it is waited for, so that one place deals with a lost peer
            self._error = error

    def wait(self) -> None:
        """Return when the members have it, or the next operation of this device may be begun.

        Raises:
            InfrastructureError: a member is gone, or the group's time-out passed.
        """
        try:
            if self._error is not None:
                raise self._error
            self._work.wait()
        except RuntimeError as error:
            raise InfrastructureError(f"broadcast in the weights group failed: {error}") from error


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Lay tensors end to end as bytes, u8[sum of sizes], row-major and without padding: SGLang's `flattened_bucket`."""
    return torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])


def unflatten(flat: Tensor, specs: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> list[Tensor]:
    """Cut the bytes of `flatten` into copies of the given dtypes and shapes.

    Raises:
        ValueError: the bytes are not as many as the specs say.
    """
    sizes = [dtype.itemsize * torch.Size(shape).numel() for dtype, shape in specs]
    if sum(sizes) != flat.numel():
        raise ValueError(f"the bucket has {flat.numel()} bytes, its tensors {sum(sizes)}")
    # Cloned, because a slice may start where its dtype may not.
    pieces = [piece.clone() for piece in flat.split(sizes)]
    return [piece.view(dtype).reshape(shape) for piece, (dtype, shape) in zip(pieces, specs, strict=True)]


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes in row-major order, in its own dtype, on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def tensor_checksum(tensor: Tensor) -> str:
    """Return the sha256 of `tensor_bytes` as hex: what `/weights_checker` compares."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()
