"""The torch process groups between a rank of the learner (rank 0) and the servers: the data path of SGLang's
weight updates.

A group is separate from the process's default group, which need not exist. It is formed as SGLang does it:
rendezvous at one address, keys prefixed with the group's name.
"""

from __future__ import annotations

import base64
import hashlib
import pickle
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, Store, TCPStore, rendezvous
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

from agentrl.errors import InfrastructureError


def join_weights_group(
    *,
    address: str,
    port: int,
    rank: int,
    world_size: int,
    name: str,
    backend: str,
    timeout_s: float,
    is_guest: bool = False,
) -> ProcessGroup:
    """Join the group `name` of `world_size` ranks.

    Blocks until rank 0 listens on address:port and all ranks joined.

    Args:
        is_guest: for rank 0: another process, which is rank 0 of another group, listens on address:port.

    Raises:
        InfrastructureError: not all joined within `timeout_s`, or the group could not be formed.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        store: Store
        if is_guest:
            store = TCPStore(address, port, is_master=False, timeout=timeout)
        else:
            store, rank, world_size = next(
                rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=timeout)
            )
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
            f"rank {rank} could not join the weights group {name!r} of {world_size} members at "
            f"{address}:{port}: {error}"
        ) from error
    _world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


def leave_weights_group(group: ProcessGroup) -> None:
    """Leave the group. It cannot be used again, but its name can."""
    dist.destroy_process_group(group)


def broadcast(tensor: Tensor, group: ProcessGroup, src: int = 0) -> None:
    """Send `tensor` (rank `src`) or receive into it (all others), in place.

    Raises:
        InfrastructureError: a peer is gone, or the group's timeout passed.
    """
    try:
        dist.broadcast(tensor, src=src, group=group)
    except RuntimeError as error:
        raise InfrastructureError(f"broadcast in the weights group failed: {error}") from error


class Broadcast:
    """An asynchronous broadcast from this rank. The tensor must not change before `wait` returns."""

    def __init__(self, tensor: Tensor, group: ProcessGroup, src: int = 0) -> None:
        self._tensor = tensor
        self._error: RuntimeError | None = None
        try:
            self._work = dist.broadcast(tensor, src=src, group=group, async_op=True)
        except RuntimeError as error:  # raised by `wait`, so that lost peers are handled in one place
            self._error = error

    def wait(self) -> None:
        """Return when the peers have the tensor, or (nccl) when the device's next operation may be enqueued.

        Raises:
            InfrastructureError: a peer is gone, or the group's timeout passed.
        """
        try:
            if self._error is not None:
                raise self._error
            self._work.wait()
        except RuntimeError as error:
            raise InfrastructureError(f"broadcast in the weights group failed: {error}") from error


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate the bytes of tensors, u8[sum of sizes], row-major and unpadded: SGLang's
    `flattened_bucket`.
    """
    return torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])


def unflatten(flat: Tensor, specs: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> list[Tensor]:
    """Split the output of `flatten` into copies with the given dtypes and shapes.

    Raises:
        ValueError: the number of bytes differs from that of the specs.
    """
    sizes = [dtype.itemsize * torch.Size(shape).numel() for dtype, shape in specs]
    if sum(sizes) != flat.numel():
        raise ValueError(f"the bucket has {flat.numel()} bytes, its tensors {sum(sizes)}")
    # Cloned for alignment: a slice may start at an offset that its dtype does not allow.
    pieces = [piece.clone() for piece in flat.split(sizes)]
    return [piece.view(dtype).reshape(shape) for piece, (dtype, shape) in zip(pieces, specs, strict=True)]


def pickle_text(text: str) -> str:
    """Return a text as SGLang takes weights in requests: [(name, its bytes u8[n])], pickled, in base64."""
    tensor = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return base64.b64encode(pickle.dumps([("text", tensor)])).decode()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes on the host, row-major and in its own dtype."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def tensor_checksum(tensor: Tensor) -> str:
    """Return the sha256 of `tensor_bytes` as hex, as `/weights_checker` of the embedded server does."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()
