"""Aggregation of token losses into one scalar: a scale per token, from counts over the whole update.

The loss of an update is sum_t scale_t * loss_t over all microbatches and ranks. Because the counts are
global, the sum does not depend on how the batch was split into microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class UpdateCounts:
    """Counts over ALL microbatches and ranks of one update.

    loss_tokens: action tokens that the correction accepted.
    sequences: sequences with at least one action token.
    action_tokens: action tokens before rejection; None if nothing was rejected.
    """

    loss_tokens: int
    sequences: int
    action_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Aggregation:
    """An aggregation rule by name. Only the rule `constant` reads `constant_length`, its L_max in tokens.

    denominator: the tokens that a mean over tokens counts. With `accepted` the mean is over the tokens
    learned from; with `original` it is over all action tokens, and rejecting a token does not raise the
    weight of the others.
    """

    rule: str
    constant_length: int | None = None
    denominator: str = "accepted"

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"unknown aggregation {self.rule!r}; known: {', '.join(RULES)}")
        if self.rule == "constant" and self.constant_length is None:
            raise ValueError(
                "aggregation `constant` needs constant_length, the tokens that a full response has"
            )


def token_scales(
    aggregation: Aggregation,
    sequence_ids_A: Tensor,
    counts: UpdateCounts,
    *,
    dtype: torch.dtype,
    original_ids: Tensor | None = None,
) -> Tensor:
    """Return f[A], the scale of each loss token.

    Args:
        sequence_ids_A: i64[A], sequence label of each loss token. It includes the tokens of these sequences
            that are in other microbatches.
        counts: of the whole update.
        original_ids: i64[any], sequence labels of all action tokens, including rejected ones; None if none
            was rejected.
    """
    counted_ids = (
        sequence_ids_A if original_ids is None or aggregation.denominator == "accepted" else original_ids
    )
    return RULES[aggregation.rule](aggregation, sequence_ids_A, counted_ids, counts).to(dtype)


def _token_mean(
    aggregation: Aggregation, sequence_ids_A: Tensor, counted_ids: Tensor, counts: UpdateCounts
) -> Tensor:
    """1 / tokens of the update. Source: Yu et al. 2025 (DAPO), arXiv:2503.14476."""
    num_tokens = counts.loss_tokens
    if aggregation.denominator == "original" and counts.action_tokens is not None:
        num_tokens = counts.action_tokens
    return _constant(sequence_ids_A, 1.0 / max(num_tokens, 1))


def _sequence_mean_token_sum(
    aggregation: Aggregation, sequence_ids_A: Tensor, counted_ids: Tensor, counts: UpdateCounts
) -> Tensor:
    """1 / sequences of the update: a sequence weighs in proportion to its length."""
    return _constant(sequence_ids_A, 1.0 / max(counts.sequences, 1))


def _sequence_mean_token_mean(
    aggregation: Aggregation, sequence_ids_A: Tensor, counted_ids: Tensor, counts: UpdateCounts
) -> Tensor:
    """1 / (sequences * length of the token's sequence). Source: Shao et al. 2024 (GRPO), arXiv:2402.03300."""
    labels, lengths = torch.unique(counted_ids, return_counts=True)
    index = torch.searchsorted(labels, sequence_ids_A)
    return 1.0 / (counts.sequences * lengths[index].double())


def _constant_length(
    aggregation: Aggregation, sequence_ids_A: Tensor, counted_ids: Tensor, counts: UpdateCounts
) -> Tensor:
    """1 / (sequences * L_max): no bias by length. Source: Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783."""
    assert aggregation.constant_length is not None
    return _constant(sequence_ids_A, 1.0 / (max(counts.sequences, 1) * aggregation.constant_length))


def _constant(like: Tensor, value: float) -> Tensor:
    return torch.full(like.shape, value, dtype=torch.float64, device=like.device)


RULES: Mapping[str, Callable[[Aggregation, Tensor, Tensor, UpdateCounts], Tensor]] = {
    "token_mean": _token_mean,
    "sequence_mean_token_sum": _sequence_mean_token_sum,
    "sequence_mean_token_mean": _sequence_mean_token_mean,
    "constant": _constant_length,
}
"""Registered name (`algorithm.aggregation`) -> rule."""
