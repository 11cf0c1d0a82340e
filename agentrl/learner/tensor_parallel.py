"""Tensor parallelism: each layer's matrices are sharded over N ranks that compute microbatches together.

Projections into the heads and into the MLP are sharded by columns, projections out of them by rows. A layer
then needs two all-reduces in its forward, of what its parts add up to, and two in its backward, of the
gradients of their inputs. transformers lists per architecture how each matrix is sharded
(`base_model_tp_plan`). A sharded matrix is a DTensor, so that FSDP, loading and checkpoints see the whole
weight, but a rank computes with its own part as with any tensor: nothing is dispatched, and torch.compile
sees plain products. FSDP shards each rank's part further over the other mesh dimensions. Norms, embeddings,
routers and head are whole on each rank, apart from FSDP, and all N ranks compute them.

Source: Shoeybi et al. 2019 (Megatron-LM), arXiv:1909.08053.
"""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from torch.nn.functional import linear

from agentrl.errors import ConfigError
from agentrl.learner.lora import cut_parts

if TYPE_CHECKING:  # takes seconds to import; the controller needs only the names of this module
    from transformers import PretrainedConfig, PreTrainedModel

_COLUMNS, _ROWS = "colwise", "rowwise"
_EXPERTS = ".mlp.experts"
_INPUT = "hidden_states"
"""Name of the input of attention, where it has one."""
_WHOLE = "replicated_with_grad_allreduce"
"""Weights that are whole on each rank but are applied to its own heads only: their gradients are summed."""


def cut_layers(module: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shard a model's matrices over the ranks of `mesh`, in place, on the weights' device.

    Call it before FSDP, and after adapters were added: of a matrix that is sharded by columns, B is, of one
    that is sharded by rows, A is. The other factor is whole on each rank.
    """
    prefix = f"{module.base_model_prefix}." if module.base_model is not module else ""
    plan = {prefix + pattern: style for pattern, style in _plan(module.config).items()}
    group = mesh.get_group().group_name
    parents = {}
    for name, child in list(module.named_modules()):
        style = next((style for pattern, style in plan.items() if _matches(name, pattern)), None)
        if style == _WHOLE:
            _sum_gradients(child, group)
        elif style == _COLUMNS:
            parent = name.rpartition(".")[0]
            parents[parent] = module.get_submodule(parent)
        if style in (_COLUMNS, _ROWS):  # not the experts, which are divided as wholes
            _cut(child, mesh, by_columns=style == _COLUMNS)
    for reader in parents.values():
        reader.register_forward_pre_hook(partial(_give_to_all, group), with_kwargs=True)


def _cut(layer: nn.Module, mesh: DeviceMesh, *, by_columns: bool) -> None:
    """Shard a linear layer and its adapter. `by_columns`: columns of the product, i.e. rows of the weight."""
    group = mesh.get_group().group_name
    cut, whole = cut_parts(layer, is_colwise=by_columns)
    for part in cut:
        assert isinstance(part, nn.Linear), f"{type(part).__name__} is no linear layer"
        _change_class(part, _ColumnLinear if by_columns else _RowLinear, group)
        _keep_part(part, "weight", mesh, dim=0 if by_columns else 1)
        if by_columns and part.bias is not None:
            _keep_part(part, "bias", mesh, dim=0)
    if by_columns and whole is not None:
        # Its products are multiplied by each rank's own rows of B, and so its gradient has N parts.
        _sum_gradients(whole, group)


def _change_class(layer: Any, kind: type[nn.Linear], group: str) -> None:
    layer.__class__ = kind
    layer.group = group


def _keep_part(layer: nn.Module, name: str, mesh: DeviceMesh, *, dim: int) -> None:
    from torch.distributed.tensor import DTensor, Shard

    whole = getattr(layer, name)
    own = whole.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()
    part = DTensor.from_local(own, mesh, [Shard(dim)], run_check=False)
    layer.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))


class _ColumnLinear(nn.Linear):
    """A linear layer of which each rank has some columns of the product."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else _own(self.bias)
        return linear(input, _own(self.weight), bias)


class _RowLinear(nn.Linear):
    """A linear layer that takes each rank's columns of the input, and returns the sum over ranks.

    group: name of the ranks' process group.
    """

    group: str

    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = _Sum.apply(linear(input, _own(self.weight)), self.group)
        return product if self.bias is None else product + self.bias


def _own(weight: Any) -> Tensor:
    """Return this rank's part of a DTensor, with gradient."""
    own: Tensor = weight.to_local()
    return own


def _give_to_all(
    group: str, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Let the gradient of a module's input be summed: each rank has some of the matrices that read it."""
    if args:
        return (_ToAll.apply(args[0], group), *args[1:]), options
    return args, options | {_INPUT: _ToAll.apply(options[_INPUT], group)}


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
    strange = sorted({*own} - {_COLUMNS, _ROWS, _WHOLE})
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


def _sum_gradients(module: nn.Module, group: str) -> None:
    """Sum the gradients of a module's own weights over `group` in the backward, before FSDP reads them."""
    # A copy of the module without weights, to call the class's forward: this instance's forward is replaced
    # below.
    stand_in = copy.deepcopy(module).to("meta")

    def forward(*args: Any, **kwargs: Any) -> Any:
        weights = {name: _ToAll.apply(weight, group) for name, weight in module.named_parameters()}
        return functional_call(stand_in, weights, args, kwargs)

    module.forward = forward


class _ToAll(torch.autograd.Function):
    """Identity whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: str) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sum(gradients[0], ctx.group), None


class _Sum(torch.autograd.Function):
    """Sum over the ranks, which all compute the same of it: the gradient of each part is that of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: str) -> Tensor:
        return _sum(part, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _sum(tensor: Tensor, group: str) -> Tensor:
    # Functional, so that torch.compile keeps it in its graph.
    ops = torch.ops._c10d_functional
    total: Tensor = ops.wait_tensor(ops.all_reduce(tensor.contiguous(), "sum", group))
    return total
