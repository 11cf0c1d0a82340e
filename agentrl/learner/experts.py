"""Expert parallelism: the experts of each layer are divided over N ranks, and tokens travel to their experts.

Each rank owns whole experts, consecutive ones: rank i of the N owns experts i E/N to (i + 1) E/N of the E in
a layer. It sends every token to the ranks that own the token's experts, computes the tokens that others send
to its own experts, and gets the results back: two all-to-alls in the forward and two in the backward. FSDP
shards each rank's experts further, over the ranks that own the same ones, and all other weights over all
ranks. The gradient of a rank's experts is the mean over the N ranks, because it contains the tokens of all of
them; FSDP's mean over the owners then makes it a mean over all ranks, as of the other weights.

With tensor parallelism, neighbors among the N ranks have the same tokens. Each of them sends a part of these,
and they gather the results; together they count as one rank in that mean.

Shapes: T tokens of this rank, K experts per token, S = T K of its (token, expert) pairs, R pairs that it
computes for all ranks, H columns of the model, I columns inside of an expert.

Source: Lepikhin et al. 2020 (GShard), arXiv:2006.16668.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from agentrl.errors import ConfigError

if TYPE_CHECKING:  # takes seconds to import; the controller needs only the names of this module
    from transformers import PretrainedConfig, PreTrainedModel

GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""Weights of all experts of a layer, [E, 2 I, H] and [E, H, I], as transformers names and shapes them in the
architectures of `agentrl.config.model_kind.TESTED_EXPERTS`.
"""

_GROUPED_DTYPES = (torch.bfloat16,)
_GROUPED_BYTES = 16
"""A row of each matrix is a multiple of these bytes, or torch's grouped product refuses it."""

Gate = Callable[[Tensor], Tensor]
"""From both inner products of an expert, [R, 2 I], to their gated product, [R, I]."""


def find_experts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that hold all experts of a layer."""
    for child in module.modules():
        if {GATE_UP, DOWN} <= child._parameters.keys():
            yield child


def check_expert_parallel(config: PretrainedConfig, path: str, size: int) -> None:
    """Raise if the model's experts cannot be divided over `size` ranks.

    Raises:
        ConfigError: it has none, or `size` does not divide their number.
    """
    if size == 1:
        return
    key = f"learner.expert_parallel={size}"
    text = config.get_text_config()
    # transformers maps the other name, num_local_experts, to this one or the reverse.
    number = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    if not number:
        raise ConfigError(
            f"{key} divides experts, and model.path={path!r} ({text.model_type}) has none; use "
            "learner.expert_parallel=1"
        )
    if number % size:
        raise ConfigError(
            f"{key} does not divide the {number} experts of the model; use a divisor of {number}"
        )


def divide_experts(
    module: PreTrainedModel, mesh: DeviceMesh, *, tensor_group: ProcessGroup | None = None
) -> None:
    """Keep only this rank's experts, in place, and let tokens travel. Call it before FSDP.

    Args:
        mesh: one dimension, of the ranks that divide the experts.
        tensor_group: those of them that have the same tokens (tensor parallelism); None: this rank alone.
    """
    from torch.distributed.tensor import DTensor, Shard

    for experts in find_experts(module):
        for name in (GATE_UP, DOWN):
            whole = getattr(experts, name)
            own = whole.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            # A tensor over the mesh, so that loading, checkpoints and norms see the whole weight.
            part = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
            experts.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))
        dispatch = _Dispatch(experts, mesh.get_group(), num_replicas=_size(tensor_group))
        experts.forward = dispatch if tensor_group is None else _Split(dispatch, tensor_group)


def _size(group: ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


class _Split:
    """The forward of all experts of a layer for ranks that have the same tokens: each sends some of them.

    Every rank returns the results of all tokens, and computes the same loss of them.
    """

    def __init__(self, dispatch: _Dispatch, group: ProcessGroup) -> None:
        self._dispatch = dispatch
        self._group = group

    def __call__(self, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        own_experts = _cut(experts_TK, self._group)
        hidden, weights = (_Own.apply(values, self._group) for values in (hidden_TH, weights_TK))
        own_results = self._dispatch(hidden, own_experts, weights)
        results: Tensor = _Together.apply(own_results, len(hidden_TH), self._group)
        return results


class _Own(torch.autograd.Function):
    """This rank's rows of what all ranks have; the gradient is of all rows, from the ranks that have them."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup) -> Tensor:
        ctx.length, ctx.group = len(values), group
        return _cut(values, group).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _join(gradients[0], ctx.length, ctx.group), None


class _Together(torch.autograd.Function):
    """The rows of all ranks, of which each has some. The gradient is the same on all ranks: each takes its
    own.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, length: int, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _join(own, length, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _cut(gradients[0], ctx.group).contiguous(), None, None


def _cut(values: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's rows; the last ranks may have fewer, or none."""
    size = -(-len(values) // group.size())
    return values[group.rank() * size : (group.rank() + 1) * size]


def _join(own: Tensor, length: int, group: ProcessGroup) -> Tensor:
    size = -(-length // group.size())
    padded = own.new_zeros(size, *own.shape[1:])
    padded[: len(own)] = own
    rows = own.new_empty(size * group.size(), *own.shape[1:])
    dist.all_gather_into_tensor(rows, padded, group=group)
    return rows[:length]


class _Dispatch:
    """The forward of all experts of a layer, of which this rank owns some.

    num_replicas: ranks that share each microbatch and its loss, by splitting matrices.
    """

    def __init__(self, experts: nn.Module, group: ProcessGroup, *, num_replicas: int) -> None:
        self._experts = experts
        self._group = group
        self._num_batches = group.size() // num_replicas

    def __call__(self, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return the sum of each token's experts, times their weights, [T, H]. A collective of the group.

        experts_TK: i64, of all experts of the layer.
        """
        gate_up, down = (self._own(name) for name in (GATE_UP, DOWN))
        num_ranks, num_own = self._group.size(), len(gate_up)
        ids_S = experts_TK.reshape(-1)
        order_S = torch.argsort(ids_S, stable=True)  # by expert, and so by rank
        counts = torch.bincount(ids_S, minlength=num_ranks * num_own)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self._group)
        # The only wait for the device: sizes of messages are numbers of the host.
        both = torch.stack([counts, arriving]).view(2, num_ranks, num_own).tolist()
        sent, received = ([sum(row) for row in rows] for rows in both)
        num_rows = [sum(column) for column in zip(*both[1], strict=True)]
        tokens_S = order_S // experts_TK.shape[1]
        rows_RH = _Exchange.apply(hidden_TH[tokens_S], sent, received, self._group)
        # They arrive by rank, and from each rank by expert.
        arrived_R = torch.arange(num_own, device=ids_S.device).repeat(num_ranks).repeat_interleave(arriving)
        by_expert_R = torch.argsort(arrived_R, stable=True)
        gate: Any = self._experts._apply_gate
        results_RH = multiply(rows_RH[by_expert_R], num_rows, gate_up, down, gate)
        back_SH = _Exchange.apply(results_RH[torch.argsort(by_expert_R)], received, sent, self._group)
        results = back_SH[torch.argsort(order_S)].view(*experts_TK.shape, hidden_TH.shape[1])
        return (results * weights_TK[..., None]).sum(1).to(hidden_TH.dtype)

    def _own(self, name: str) -> Tensor:
        # FSDP has gathered it over the ranks that own the same experts.
        own: Tensor = getattr(self._experts, name).to_local()
        if own.requires_grad:
            # Not by FSDP's `set_gradient_divide_factor`, which divides a single owner's float64 twice.
            own.register_hook(lambda gradient: gradient / self._num_batches)
        return own


class _Exchange(torch.autograd.Function):
    """All-to-all of rows; its backward sends the gradients the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup
    ) -> Tensor:
        """Return the rows that the ranks of `group` sent to this one, in order of ranks.

        sent, received: number of rows to and from each rank.
        """
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group)
    return out


def multiply(rows_RH: Tensor, num_rows: Sequence[int], gate_up: Tensor, down: Tensor, gate: Gate) -> Tensor:
    """Return each row's product by its expert, [R, H].

    A grouped product where torch has a kernel for it, else expert by expert.

    Args:
        rows_RH: by expert.
        num_rows: of each of the rank's experts, on the host.
        gate_up, down: [n, 2 I, H] and [n, H, I], this rank's n experts.
    """
    grouped = rows_RH.is_cuda and can_group(rows_RH, gate_up, down)
    return (multiply_grouped if grouped else multiply_each)(rows_RH, num_rows, gate_up, down, gate)


def can_group(rows_RH: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    """Return whether torch's grouped product takes these rows and weights."""
    widths = (gate_up.shape[-1], down.shape[-1])
    return (
        hasattr(nn.functional, "grouped_mm")  # from torch 2.10 on
        and rows_RH.dtype in _GROUPED_DTYPES
        and len(rows_RH) > 0
        and all(width * rows_RH.itemsize % _GROUPED_BYTES == 0 for width in widths)
    )


def multiply_grouped(
    rows_RH: Tensor, num_rows: Sequence[int], gate_up: Tensor, down: Tensor, gate: Gate
) -> Tensor:
    """`multiply` by two products of all experts together."""
    ends = torch.tensor(num_rows, device=rows_RH.device).cumsum(0, dtype=torch.int32)
    inner_RI = gate(nn.functional.grouped_mm(rows_RH, gate_up.transpose(1, 2), offs=ends))
    return nn.functional.grouped_mm(inner_RI, down.transpose(1, 2), offs=ends)


def multiply_each(
    rows_RH: Tensor, num_rows: Sequence[int], gate_up: Tensor, down: Tensor, gate: Gate
) -> Tensor:
    """`multiply` expert by expert, also those without rows: FSDP waits for the gradient of each weight."""
    # Unbound, because the gradient of an indexed expert is as large as all of them.
    experts = zip(rows_RH.split(list(num_rows)), gate_up.unbind(), down.unbind(), strict=True)
    linear = nn.functional.linear
    return torch.cat([linear(gate(linear(rows, first)), second) for rows, first, second in experts])
