"""How token losses become one number: a scale per token, from counts over the whole optimizer update.

The loss of an update is sum_t scale_t * loss_t over all microbatches and ranks. Because the counts are global, the sum does not
depend on how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class UpdateCounts:
    """Counts over ALL microbatches and ranks of one update.

    loss_tokens: action tokens that the correction accepted. sequences: those with at least one action token.
    """

    loss_tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class Aggregation:
    """A rule by name; `constant_length` (tokens) is L_max of the rule `constant`, unused by the others."""

    rule: str
    constant_length: int | None = None

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"unknown aggregation {self.rule!r}; known: {', '.join(RULES)}")
        if self.rule == "constant" and self.constant_length is None:
            raise ValueError("aggregation `constant` needs constant_length, the tokens that a full response has")


def token_scales(aggregation: Aggregation, sequence_ids_A: Tensor, counts: UpdateCounts, *, dtype: torch.dtype) -> Tensor:
    """Return f[A], the scale of each loss token.

    Args:
        sequence_ids_A: i64[A], label of the sequence of each loss token; a sequence is never cut over two calls.
        counts: of the whole update.
    """
    return RULES[aggregation.rule](aggregation, sequence_ids_A, counts).to(dtype)


def _token_mean(aggregation: Aggregation, sequence_ids_A: Tensor, counts: UpdateCounts) -> Tensor:
    return _constant(sequence_ids_A, 1.0 / max(counts.loss_tokens, 1))


def _sequence_mean_token_sum(aggregation: Aggregation, sequence_ids_A: Tensor, counts: UpdateCounts) -> Tensor:
    return _constant(sequence_ids_A, 1.0 / max(counts.sequences, 1))


def _sequence_mean_token_mean(aggregation: Aggregation, sequence_ids_A: Tensor, counts: UpdateCounts) -> Tensor:
    _, index, lengths = torch.unique(sequence_ids_A, return_inverse=True, return_counts=True)
    return 1.0 / (max(counts.sequences, 1) * lengths[index].double())


def _constant_length(aggregation: Aggregation, sequence_ids_A: Tensor, counts: UpdateCounts) -> Tensor:
    assert aggregation.constant_length is not None
    return _constant(sequence_ids_A, 1.0 / (max(counts.sequences, 1) * aggregation.constant_length))


def _constant(like: Tensor, value: float) -> Tensor:
    return torch.full(like.shape, value, dtype=torch.float64, device=like.device)


RULES: Mapping[str, Callable[[Aggregation, Tensor, UpdateCounts], Tensor]] = {
    "token_mean": _token_mean,
    "sequence_mean_token_sum": _sequence_mean_token_sum,
    "sequence_mean_token_mean": _sequence_mean_token_mean,
    "constant": _constant_length,
}
"""Registered name (`algorithm.aggregation`) -> rule."""
