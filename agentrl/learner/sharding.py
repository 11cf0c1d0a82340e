"""Sharding of a model over ranks: FSDP2 per layer, over one mesh dimension or two (HSDP), and layer
wrappers.

The weights of experts may be divided over ranks before (expert parallelism, see `agentrl.learner.experts`).
FSDP then shards each rank's experts over the ranks that own the same ones, in units of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from agentrl.config.learner import LearnerConfig
from agentrl.errors import ConfigError
from agentrl.learner.activation_offload import offload_inputs
from agentrl.learner.experts import find_experts

if TYPE_CHECKING:  # takes a second to import; the controller needs only the names of this module
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Shard
    from typing_extensions import TypeIs


EXPERT = "expert"
"""Name of the mesh dimension over which experts are divided."""
TENSOR = "tensor"
"""Name of the mesh dimension over which matrices are split."""

_STACKED = 3
"""Dimensions of a weight that stacks the matrices of all experts."""


def open_mesh(device_type: str, *, world_size: int, shard_size: int | None) -> DeviceMesh:
    """Return the mesh of all ranks, (ranks,) or with HSDP (copies, `shard_size`). A collective.

    HSDP applies if one copy of the model is sharded over fewer than all ranks.
    """
    if shard_size is None or shard_size == world_size:
        return init_device_mesh(device_type, (world_size,))
    return init_device_mesh(
        device_type, (world_size // shard_size, shard_size), mesh_dim_names=("copy", "shard")
    )


def open_tensor_mesh(
    device_type: str, *, world_size: int, shard_size: int | None, tensor_parallel: int
) -> DeviceMesh:
    """Return the mesh (shard, tensor) of all ranks, or with HSDP (copy, shard, tensor). A collective.

    FSDP shards over all dimensions but the last; neighboring ranks form that one and compute together.
    """
    return _open_with_copies(
        device_type, TENSOR, tensor_parallel, world_size=world_size, shard_size=shard_size
    )


def open_expert_mesh(
    device_type: str, *, world_size: int, shard_size: int | None, expert_parallel: int
) -> DeviceMesh:
    """Return the mesh (shard, expert) of all ranks, or with HSDP (copy, shard, expert). A collective.

    Neighboring ranks form the last dimension, over which the experts of each layer are divided.
    """
    return _open_with_copies(
        device_type, EXPERT, expert_parallel, world_size=world_size, shard_size=shard_size
    )


def _open_with_copies(
    device_type: str, last: str, length: int, *, world_size: int, shard_size: int | None
) -> DeviceMesh:
    size = shard_size or world_size
    lengths = (world_size // size, size // length, length)
    names = ("copy", "shard", last)
    first = int(shard_size is None or shard_size == world_size)
    mesh = init_device_mesh(device_type, lengths[first:], mesh_dim_names=names[first:])
    # Norms are then summed over both dimensions at once; otherwise DTensor warns, and ranks may round
    # differently.
    mesh[names[1:]]._flatten()
    return mesh


def without_last(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of all dimensions but the last."""
    return mesh[(mesh.mesh_dim_names or ())[:-1]]


def shard(
    module: nn.Module,
    mesh: DeviceMesh,
    config: LearnerConfig,
    *,
    compute_dtype: torch.dtype | None,
    has_backward: bool,
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Wrap every layer of the model as `config` says, and shard layers and root in place.

    A rank that has nothing to exchange (`_is_alone`) keeps plain tensors: FSDP would copy all weights before
    each forward, and all gradients after each backward.

    Args:
        compute_dtype: of forward and backward; gradients are reduced in float32. None: the dtype of the
            weights.
        has_backward: False for a frozen model, which needs no recomputation.
        expert_mesh: of `open_expert_mesh`, if experts are divided over its last dimension.
    """
    layers = find_layers(module)
    for layer in layers:
        if config.compile:
            # Compile only the forward: FSDP's hooks stay outside of the graph.
            layer.forward = torch.compile(layer.forward, dynamic=True)
            # Otherwise torch treats equal sizes as one symbol: a microbatch with as many tokens as the model
            # has columns or heads would specialize the graph to that size.
            torch.fx.experimental._config.use_duck_shape = False
        if config.gradient_checkpointing and has_backward:
            # Inside of the FSDP wrapper, so weights are gathered once for recomputation and backward.
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    if config.activation_offload and has_backward:
        offload_inputs(layers)
    if not _is_alone(mesh, compute_dtype):
        _shard(module, layers, mesh, config, compute_dtype, expert_mesh)


def _is_alone(mesh: DeviceMesh, compute_dtype: torch.dtype | None) -> bool:
    """Return whether one rank holds the whole model in CPU memory and computes with the weights as they
    are.
    """
    return dist.get_world_size() == 1 and mesh.device_type == "cpu" and compute_dtype is None


def _shard(
    module: nn.Module,
    layers: list[nn.Module],
    mesh: DeviceMesh,
    config: LearnerConfig,
    compute_dtype: torch.dtype | None,
    expert_mesh: DeviceMesh | None,
) -> None:
    from torch.distributed.fsdp import fully_shard

    options = _options(mesh, config, compute_dtype)
    frees = config.fsdp.reshard_after_forward
    units: list[list[nn.Module]] = []
    for layer in layers:
        experts = [] if expert_mesh is None else list(find_experts(layer))
        if expert_mesh is not None:
            owners = without_last(expert_mesh)
            for child in experts:
                fully_shard(child, reshard_after_forward=frees, **_options(owners, config, compute_dtype))
        fully_shard(layer, reshard_after_forward=frees, **options)
        units.append([layer, *experts])
    fully_shard(module, **options)
    _prefetch(units, config.fsdp.forward_prefetch)


def home_of_weights(config: LearnerConfig, device: torch.device) -> torch.device:
    """Return where the weights of ranks that compute on `device` are kept; FSDP refuses any other place."""
    return torch.device("cpu") if config.offload == "parameters" else device


def balanced_dimension(shape: Sequence[int], num_ranks: int) -> int:
    """Return the dimension by which FSDP shards a weight of `shape` over `num_ranks`.

    The first, for which FSDP needs no copies; of stacked matrices, such as those of experts, the first that
    the ranks divide evenly, if there is one. Sharded by its 128 experts, a weight would be on 128 of 256
    ranks.
    """
    if len(shape) < _STACKED:
        return 0
    return next((dim for dim, size in enumerate(shape) if size % num_ranks == 0), 0)


def find_layers(module: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of a transformers model in the order of the forward."""
    classes = set(getattr(module, "_no_split_modules", None) or ())
    return [child for child in module.modules() if type(child).__name__ in classes]


def reshard(module: nn.Module) -> None:
    """Free gathered weights after a forward without backward; the next step would make them stale."""
    for child in _sharded(module):
        child.reshard()


def gather(tensor: Tensor) -> Tensor:
    """Return the full tensor, without gradient. A collective if the tensor is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if _is_sharded(tensor) else tensor


def gather_parts(own: Tensor, like: Tensor) -> Tensor:
    """Return the full tensor of which every rank passes its own part, cut as `like` is.

    A collective if `like` is sharded.
    """
    if not _is_sharded(like):
        return own
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(
        own, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    ).full_tensor()


def gather_rows(tensor: Tensor, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    """Return the rows `begin` to `end` of the full tensor in `dtype`, without gradient.

    A collective if the tensor is sharded: only these rows are sent.
    """
    tensor = tensor.detach()
    if not _is_sharded(tensor):
        return tensor[begin:end].to(dtype)
    own, offset = own_part(tensor)
    rows = torch.zeros(end - begin, *tensor.shape[1:], dtype=dtype, device=own.device)
    first, last = max(begin, offset[0]), min(end, offset[0] + len(own))
    if first < last:
        columns = tuple(slice(o, o + size) for o, size in zip(offset[1:], own.shape[1:], strict=True))
        rows[slice(first - begin, last - begin), *columns] = own[first - offset[0] : last - offset[0]].to(
            dtype
        )
    # Summed as bytes, because every element has one owner, and a float's -0.0 would become 0.0.
    for dimension, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            dist.all_reduce(rows.view(torch.uint8), group=tensor.device_mesh.get_group(dimension))
    return rows


def own_part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the part of a tensor that this rank holds, and where it begins in the full tensor."""
    tensor = tensor.detach()
    if not _is_sharded(tensor):
        return tensor, (0,) * tensor.ndim
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    own = tensor.to_local()
    assert own.shape == shape, f"{tuple(own.shape)} is held instead of {tuple(shape)}"
    return own, tuple(offset)


def with_part(tensor: Tensor, own: Tensor) -> Tensor:
    """Return a tensor sharded like `tensor`, of which this rank holds `own`, on whatever device it is."""
    if not _is_sharded(tensor):
        return own
    from torch.distributed.tensor import DTensor

    # Not `from_local`, which moves the part to the device of the mesh.
    return DTensor(own, tensor._spec, requires_grad=False)


def copy_of(tensor: Tensor) -> tuple[int, int]:
    """Return which copy of its part this rank holds, and how many ranks hold a copy of the same part."""
    if not _is_sharded(tensor):
        return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    index, count = 0, 1
    for size, own, placement in zip(
        tensor.device_mesh.shape, tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True
    ):
        if placement.is_replicate():
            index, count = index * size + own, count * size
    return index, count


@torch.no_grad()
def put(tensor: Tensor, full: Tensor) -> None:
    """Write the full values into a tensor; each rank keeps its own part."""
    own, offset = own_part(tensor)
    own.copy_(full[tuple(slice(o, o + size) for o, size in zip(offset, own.shape, strict=True))])


def mesh_of(tensor: Tensor) -> DeviceMesh | None:
    """Return the mesh over which a tensor is sharded, None if it is not."""
    return tensor.device_mesh if _is_sharded(tensor) else None


def _is_sharded(tensor: Tensor) -> TypeIs[DTensor]:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _sharded(module: nn.Module) -> list[FSDPModule]:
    from torch.distributed.fsdp import FSDPModule

    return [child for child in module.modules() if isinstance(child, FSDPModule)]


def _options(mesh: DeviceMesh, config: LearnerConfig, compute_dtype: torch.dtype | None) -> dict[str, Any]:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    options: dict[str, Any] = {"mesh": mesh, "shard_placement_fn": partial(_placement, mesh.shape[-1])}
    if compute_dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    if config.offload == "parameters":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    return options


def _placement(num_ranks: int, weight: nn.Parameter) -> Shard:
    from torch.distributed.tensor import Shard

    # FSDP shards what a rank owns of a weight that is divided already.
    own = weight.to_local() if _is_sharded(weight) else weight
    dimension = balanced_dimension(own.shape, num_ranks)
    if own.ndim == _STACKED and own is not weight and own.shape[dimension] % num_ranks:
        # DTensor would say wrongly which rows such a rank has.
        raise ConfigError(
            f"the {num_ranks} ranks that own the same experts divide none of the sizes {list(own.shape)} of "
            "their weights; use another learner.expert_parallel or learner.world_size"
        )
    return Shard(dimension)


def _prefetch(units: Sequence[Sequence[nn.Module]], count: int) -> None:
    """Let each layer gather the `count` following ones, with their experts, ahead of their forward."""
    for index, (layer, *_) in enumerate(units):
        following = list(chain.from_iterable(units[index + 1 : index + 1 + count]))
        if following:
            layer.set_modules_to_forward_prefetch(following)  # type: ignore[operator]  # FSDP mixes its class in at run time
