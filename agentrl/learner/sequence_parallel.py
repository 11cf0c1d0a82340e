"""Sequence parallelism: N ranks share each microbatch, each with a part of its tokens.

Everything but attention works token by token, so a rank needs only its part. Before attention, an all-to-all
gives each rank all tokens of H/N heads. After it, another all-to-all gives each rank all heads of its part
back. The values read from the output (log-probabilities, scores) are gathered on all N ranks, which then
compute the same loss.

t tokens of a rank's part, T = N t of the padded microbatch, H query heads, K key-value heads, D their width,
P positions that are read.

Source: Jacobs et al. 2023 (DeepSpeed-Ulysses), arXiv:2309.14509.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from agentrl.errors import ConfigError

if TYPE_CHECKING:  # takes seconds to import; the controller needs only the names of this module
    from transformers import PretrainedConfig

_LENGTH_BOUND_ROPES = {"dynamic", "longrope"}


@dataclass(frozen=True, slots=True, eq=False)
class TokenShard:
    """The part [start, start + length) of a microbatch that one rank computes, padded at the end.

    is_own: bool[P], True where a position to read is in the part.
    positions: i64[P'], these positions, counted from `start`.
    """

    start: int
    length: int
    padding: int
    is_own: Tensor
    positions: Tensor
    group: ProcessGroup

    @classmethod
    def of(cls, positions_P: Tensor, *, num_tokens: int, group: ProcessGroup) -> TokenShard:
        """Return this rank's part of a microbatch of `num_tokens`, of which `positions_P` (i64[P]) are
        read.
        """
        length = -(-num_tokens // group.size())
        start = group.rank() * length
        is_own = (positions_P >= start) & (positions_P < start + length)
        return cls(
            start, length, length * group.size() - num_tokens, is_own, positions_P[is_own] - start, group
        )

    def cut(self, column_T: Tensor) -> Tensor:
        """Return this rank's part of a column, [T, ...] to [t, ...]; padding is 0."""
        padded = torch.cat([column_T, column_T.new_zeros(self.padding, *column_T.shape[1:])])
        return padded[self.start : self.start + self.length]

    def join(self, values: Tensor) -> Tensor:
        """Return f[P] on every rank of the group, from the f[P'] that each rank has read. A collective.

        Every rank computes the same loss from them, so the gradient of its own values is not summed over the
        ranks.
        """
        joined: Tensor = _Join.apply(values, self.is_own, self.group)
        return joined


def tokens_to_heads(heads: tuple[Tensor, ...], group: ProcessGroup) -> tuple[Tensor, ...]:
    """Exchange this rank's tokens of all heads for all tokens of its heads, in one all-to-all.

    f[1, H, t, D] becomes f[1, H/N, T, D], for each of `heads`. If there are fewer heads than ranks (shared
    keys and values), several ranks get the same head.
    """
    size = group.size()
    blocks = [_repeat(h, size).unflatten(1, (size, -1)) for h in heads]  # [1, N, H/N, t, D]
    shapes = [b.shape[2:] for b in blocks]
    received = _Exchange.apply(torch.cat([b[0].flatten(1) for b in blocks], dim=1), group)
    pieces = received.split([shape.numel() for shape in shapes], dim=1)
    # The first dimension is the sending rank: [N, H/N, t, D] to [1, H/N, N t, D].
    return tuple(
        p.unflatten(1, shape).transpose(0, 1).flatten(1, 2)[None]
        for p, shape in zip(pieces, shapes, strict=True)
    )


def heads_to_tokens(heads: Tensor, group: ProcessGroup) -> Tensor:
    """Undo `tokens_to_heads` for the attention's output, f[1, H/N, T, D] to f[1, H, t, D]."""
    blocks = heads[0].unflatten(1, (group.size(), -1)).transpose(0, 1)  # [N, H/N, t, D]
    received: Tensor = _Exchange.apply(blocks.flatten(1), group)
    return received.view(blocks.shape).flatten(0, 1)[None]


def check_sequence_parallel(config: PretrainedConfig, size: int, *, tensor_parallel: int = 1) -> None:
    """Raise if `size` ranks cannot share a microbatch of the model.

    tensor_parallel: ranks over which its heads are divided before.

    Raises:
        ConfigError: the heads cannot be divided evenly, or positions depend on the whole microbatch.
    """
    if size == 1:
        return
    config = config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    name = f"learner.sequence_parallel={size}"
    heads, kv_heads = heads // tensor_parallel, kv_heads // tensor_parallel
    place = "the model" if tensor_parallel == 1 else f"a rank (learner.tensor_parallel={tensor_parallel})"
    if heads % size:
        raise ConfigError(
            f"{name} does not divide the {heads} attention heads of {place}; use a divisor of {heads}"
        )
    if kv_heads % size and size % kv_heads:
        raise ConfigError(
            f"{name} does not fit the {kv_heads} key-value heads of {place}; use a divisor or a multiple "
            f"of {kv_heads}"
        )
    ropes = sorted(_LENGTH_BOUND_ROPES & _rope_types(getattr(config, "rope_parameters", None) or {}))
    if ropes:
        raise ConfigError(
            f"{name}: rotary embeddings of type {ropes[0]!r} depend on the length of the whole microbatch; "
            "use learner.sequence_parallel=1"
        )


def _rope_types(parameters: dict[str, Any]) -> set[str]:
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(p["rope_type"]) for p in (parameters, *nested) if "rope_type" in p}


def _repeat(heads: Tensor, size: int) -> Tensor:
    num_heads = heads.shape[1]
    return heads if num_heads >= size else heads.repeat_interleave(size // num_heads, dim=1)


class _Exchange(torch.autograd.Function):
    """All-to-all of N equal blocks, f[N, X]: block j of rank i becomes block i of rank j.

    The exchange is its own inverse, hence also its own gradient.
    """

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(blocks, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradients[0], ctx.group), None


def _exchange(blocks: Tensor, group: ProcessGroup) -> Tensor:
    received = torch.empty_like(blocks, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, blocks.contiguous(), group=group)
    return received


class _Join(torch.autograd.Function):
    """Gathers values of which each rank has some (see `TokenShard.join`).

    It sums over ranks with zeros elsewhere, which is exact. The backward pass takes each rank's own gradients
    without a collective, because every rank computes the same loss.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, is_own: Tensor, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(is_own)
        joined = values.new_zeros(is_own.shape)
        joined[is_own] = values
        dist.all_reduce(joined, group=group)
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (is_own,) = ctx.saved_tensors
        return gradients[0][is_own], None, None
