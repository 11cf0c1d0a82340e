"""Tensor parallelism: each layer's matrices are sharded over N ranks that compute microbatches together.

Projections into the heads and into the MLP are sharded by columns, projections out of them by rows. A layer
then needs two all-reduces in its forward and two in its backward. transformers lists per architecture how
each matrix is sharded (`base_model_tp_plan`). torch's DTensor does the sharding, and FSDP shards each rank's
part further over the other mesh dimensions. Norms, embeddings, routers and head are whole on each rank, apart
from FSDP, and all N ranks compute them.

Source: Shoeybi et al. 2019 (Megatron-LM), arXiv:1909.08053.
"""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call

from agentrl.errors import ConfigError
from agentrl.learner.lora import cut_parts

if TYPE_CHECKING:  # takes seconds to import; the controller needs only the names of this module
    from transformers import PretrainedConfig, PreTrainedModel

_STYLES = ("colwise", "rowwise")
_EXPERTS = ".mlp.experts"
_WHOLE = "replicated_with_grad_allreduce"
"""Weights that are whole on each rank but are applied to its own heads only: their gradients are summed."""


def cut_layers(module: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shard a model's matrices over the ranks of `mesh`, in place, on the weights' device. A collective.

    Call it before FSDP, and after adapters were added: of a matrix that is sharded by columns, B is, of one
    that is sharded by rows, A is. The other factor is whole on each rank.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = dict(zip(_STYLES, (ColwiseParallel, RowwiseParallel), strict=True))
    prefix = f"{module.base_model_prefix}." if module.base_model is not module else ""
    found = {prefix + pattern: style for pattern, style in _plan(module.config).items()}
    plan, shared = {}, []
    for name, child in module.named_modules():
        style = next((style for pattern, style in found.items() if _matches(name, pattern)), None)
        if style == _WHOLE:
            shared.append(child)
        elif style in styles:  # not the experts, which are divided as wholes
            for part in cut_parts(child, is_colwise=style == _STYLES[0]):
                plan[f"{name}{part}"] = styles[style]()
    parallelize_module(module, mesh, plan)
    for child in shared:
        _sum_gradients(child, mesh.get_group())


def _matches(name: str, pattern: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]+"), name) is not None


def check_tensor_parallel(config: PretrainedConfig, size: int, *, divides_experts: bool = False) -> None:
    """Raise if the model's layers cannot be sharded over `size` ranks.

    divides_experts: experts are not sharded with the other matrices (see `agentrl.learner.experts`).

    Raises:
        ConfigError: its heads or its width cannot be divided evenly, or a layer is not plain attention and
            MLP.
    """
    if size == 1:
        return
    config, name = config.get_text_config(), f"learner.tensor_parallel={size}"
    plan = _plan(config)
    own = [style for name, style in plan.items() if not (divides_experts and _EXPERTS in name)]
    strange = sorted({*own} - {*_STYLES, _WHOLE})
    if not plan or strange:
        reason = f"its layers are cut as {strange[0]!r}" if strange else "transformers has no plan for it"
        raise ConfigError(
            f"{name} is for models such as Llama, Qwen2 and Qwen3, not {config.model_type!r}: {reason}"
        )
    heads = config.num_attention_heads
    sizes = {
        "attention heads": heads,
        "key-value heads": getattr(config, "num_key_value_heads", None) or heads,
        "columns of the MLP": config.intermediate_size,
    }
    for what, number in sizes.items():
        if number % size:
            raise ConfigError(
                f"{name} does not divide the {number} {what} of the model; use a divisor of {number}"
            )


def _plan(config: PretrainedConfig) -> dict[str, str]:
    return dict(getattr(config.get_text_config(), "base_model_tp_plan", None) or {})


def _sum_gradients(module: nn.Module, group: ProcessGroup) -> None:
    """Sum the gradients of a module's own weights over `group` in the backward, before FSDP reads them."""
    # A copy of the module without weights, to call the class's forward: this instance's forward is replaced
    # below.
    stand_in = copy.deepcopy(module).to("meta")

    def forward(*args: Any, **kwargs: Any) -> Any:
        weights = {name: _SumGradient.apply(weight, group) for name, weight in module.named_parameters()}
        return functional_call(stand_in, weights, args, kwargs)

    module.forward = forward


class _SumGradient(torch.autograd.Function):
    """Identity whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None
