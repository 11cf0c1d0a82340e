"""How a model is spread over the ranks: FSDP2 layer by layer, over one mesh dimension or two (HSDP), with what each layer is wrapped in."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from agentrl.config.learner import LearnerConfig


def open_mesh(device_type: str, *, world_size: int, shard_size: int | None) -> DeviceMesh:
    """Return the mesh of all ranks: one dimension, or (copies, `shard_size`) when one copy is spread over fewer ranks. A collective."""
    if shard_size is None or shard_size == world_size:
        return init_device_mesh(device_type, (world_size,))
    return init_device_mesh(device_type, (world_size // shard_size, shard_size), mesh_dim_names=("copy", "shard"))


def open_tensor_mesh(device_type: str, *, world_size: int, tensor_parallel: int) -> DeviceMesh:
    """Return the mesh (data, tensor) of all ranks: FSDP shards over the first dimension, neighbours compute together. A collective."""
    return init_device_mesh(device_type, (world_size // tensor_parallel, tensor_parallel), mesh_dim_names=("data", "tensor"))


def shard(module: nn.Module, mesh: DeviceMesh, config: LearnerConfig, *, compute_dtype: torch.dtype | None, has_backward: bool) -> None:
    """Wrap every layer of the model as `config` says, and shard layers and root in place.

    Args:
        compute_dtype: of forward and backward; gradients are reduced in float32. None: that of the weights.
        has_backward: False for a frozen model, which recomputes nothing.
    """
    options = _options(mesh, config, compute_dtype)
    layers = find_layers(module)
    for layer in layers:
        if config.compile:
            # The forward alone: FSDP's hooks stay outside of the graph.
            layer.forward = torch.compile(layer.forward, dynamic=True)
            # Else a row with as many tokens as the model has columns, heads or dimensions of a head would bind its graph to that number.
            torch.fx.experimental._config.use_duck_shape = False
        if config.gradient_checkpointing and has_backward:
            # Inside of what FSDP wraps, so that the weights are gathered once for recomputation and backward.
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        fully_shard(layer, reshard_after_forward=config.fsdp.reshard_after_forward, **options)
    fully_shard(module, **options)
    _prefetch(layers, config.fsdp.forward_prefetch)


def find_layers(module: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of a transformers model in the order of the forward."""
    classes = set(getattr(module, "_no_split_modules", None) or ())
    return [child for child in module.modules() if type(child).__name__ in classes]


def reshard(module: nn.Module) -> None:
    """Free gathered weights after a forward without backward: they would go stale at the next optimizer step."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def is_alone(mesh: DeviceMesh) -> bool:
    """Say whether one rank holds the whole model in the memory that it computes in, so that there is nothing to share with others."""
    return mesh.size() == 1 and mesh.device_type == "cpu"


def hold(module: nn.Module, *, until_next_backward: bool) -> None:
    """Keep gathered weights, and gradients where they are, through the coming backward, or let it share and free them as ever.

    For a rank that is alone (`is_alone`): sharing is copying there, some 3 ms of each microbatch of a small model. The last backward
    before an optimizer step must share.
    """
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.set_reshard_after_backward(not until_next_backward, recurse=False)
            child.set_requires_gradient_sync(not until_next_backward, recurse=False)


def _options(mesh: DeviceMesh, config: LearnerConfig, compute_dtype: torch.dtype | None) -> dict[str, Any]:
    options: dict[str, Any] = {"mesh": mesh}
    if compute_dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    if config.offload == "parameters":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    return options


def _prefetch(layers: list[nn.Module], count: int) -> None:
    for index, layer in enumerate(layers):
        following = layers[index + 1 : index + 1 + count]
        if following:
            layer.set_modules_to_forward_prefetch(following)  # type: ignore[operator]  # FSDP mixes its class in at run time
