"""Sampling of one token per row, with the log-probability that SGLang would report.

Legend: B rows (requests that get a token in this forward), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How one request samples: temperature 0 is greedy, top_k -1 is off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0

    @property
    def is_truncated(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


GREEDY = RowSampling(temperature=0.0)


def sample(logits_BV: Tensor, rows: Sequence[RowSampling]) -> tuple[Tensor, Tensor]:
    """Sample one token per row and report its log-probability.

    The log-probability is that of softmax(logits / temperature) over the whole vocabulary; top_p, top_k and min_p restrict what
    may be sampled but do not renormalise it. A greedy row takes the largest logit and reports its log-probability at
    temperature 1. All three are SGLang's meanings.

    A row whose logits are not finite gets any token, with a log-probability of NaN: nothing can be sampled from it, and the rows of
    others are none the worse.

    Args:
        logits_BV: f32[B, V].
        rows: B entries.

    Returns:
        tokens: i64[B]; logprobs: f32[B].
    """
    temperatures = [row.temperature or 1.0 for row in rows]
    if any(temperature != 1.0 for temperature in temperatures):
        # From the largest down, so that a small temperature makes nothing infinite but what has no chance.
        logits_BV = logits_BV - logits_BV.amax(dim=-1, keepdim=True)
        logits_BV = logits_BV / torch.tensor(temperatures, dtype=logits_BV.dtype, device=logits_BV.device).unsqueeze(1)
    logprobs_BV = torch.log_softmax(logits_BV, dim=-1)
    # One NaN or positive infinity among the logits makes the whole row NaN.
    probs_BV = logprobs_BV.exp().nan_to_num_(nan=1.0)
    if any(row.is_truncated and row.temperature > 0 for row in rows):
        probs_BV = truncate(probs_BV, rows)
    tokens_B = torch.multinomial(probs_BV, num_samples=1).squeeze(1)
    is_greedy = [row.temperature == 0.0 for row in rows]
    if any(is_greedy):
        mask_B = torch.tensor(is_greedy, device=logits_BV.device)
        tokens_B = torch.where(mask_B, logits_BV.argmax(dim=-1), tokens_B)
    return tokens_B, logprobs_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1)


def truncate(probs_BV: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """Set to 0 what a row's top_k, top_p and min_p exclude; the most likely token always stays. Not renormalised.

    top_p keeps the smallest set whose mass reaches it; min_p keeps what is at least that fraction of the largest probability.
    """
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    device, dtype, vocabulary = probs_BV.device, probs_BV.dtype, probs_BV.shape[1]
    top_k_B1 = torch.tensor([row.top_k if row.top_k > 0 else vocabulary for row in rows], device=device).unsqueeze(1)
    top_p_B1 = torch.tensor([row.top_p for row in rows], device=device, dtype=dtype).unsqueeze(1)
    min_p_B1 = torch.tensor([row.min_p for row in rows], device=device, dtype=dtype).unsqueeze(1)
    mass_before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV
    keep_BV = torch.arange(vocabulary, device=device).unsqueeze(0) < top_k_B1
    # A row with top_p = 1 keeps all: the rounded cumulative sum may exceed 1 before its end.
    keep_BV &= (mass_before_BV < top_p_B1) | (top_p_B1 >= 1.0)
    keep_BV &= sorted_BV >= min_p_B1 * sorted_BV[:, :1]
    keep_BV[:, 0] = True
    return torch.zeros_like(probs_BV).scatter_(1, order_BV, torch.where(keep_BV, sorted_BV, 0.0))
