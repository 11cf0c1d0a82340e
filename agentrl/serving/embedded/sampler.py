"""Sampling of one token per request, with the log-probability that SGLang would report.

Legend: B requests that get a token in this forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling parameters of one request: temperature 0 is greedy, top_k -1 is off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0

    @property
    def is_truncated(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


GREEDY = RowSampling(temperature=0.0)


def sample(logits_BV: Tensor, rows: Sequence[RowSampling]) -> tuple[Tensor, Tensor]:
    """Sample one token per request and return its log-probability.

    The semantics are SGLang's. The log-probability is that of softmax(logits / temperature) over the whole
    vocabulary: top_p, top_k and min_p restrict the choice but do not renormalise it. A greedy request takes
    the largest logit and reports its log-probability at temperature 1.

    If a request's logits are not finite, it gets an arbitrary token with log-probability NaN. The other
    requests are not affected.

    Args:
        logits_BV: f32[B, V].
        rows: B entries.

    Returns:
        tokens: i64[B]; logprobs: f32[B].
    """
    temperatures = [row.temperature or 1.0 for row in rows]
    if any(temperature != 1.0 for temperature in temperatures):
        # Subtract the maximum first: a small temperature then turns only logits without a chance into -inf.
        logits_BV = logits_BV - logits_BV.amax(dim=-1, keepdim=True)
        logits_BV = logits_BV / torch.tensor(
            temperatures, dtype=logits_BV.dtype, device=logits_BV.device
        ).unsqueeze(1)
    logprobs_BV = torch.log_softmax(logits_BV, dim=-1)
    # log_softmax makes a whole row of the matrix NaN if one logit is NaN or +inf; multinomial would raise.
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
    """Set the probabilities that top_k, top_p and min_p exclude to 0. Not renormalised.

    top_p keeps the smallest set whose mass reaches it. min_p keeps tokens with at least this fraction of the
    largest probability. The most likely token always stays.
    """
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    device, dtype, vocabulary = probs_BV.device, probs_BV.dtype, probs_BV.shape[1]
    top_k_B1 = torch.tensor(
        [row.top_k if row.top_k > 0 else vocabulary for row in rows], device=device
    ).unsqueeze(1)
    top_p_B1 = torch.tensor([row.top_p for row in rows], device=device, dtype=dtype).unsqueeze(1)
    min_p_B1 = torch.tensor([row.min_p for row in rows], device=device, dtype=dtype).unsqueeze(1)
    mass_before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV
    keep_BV = torch.arange(vocabulary, device=device).unsqueeze(0) < top_k_B1
    # top_p = 1 keeps everything explicitly: a rounded cumulative sum may exceed 1 before its end.
    keep_BV &= (mass_before_BV < top_p_B1) | (top_p_B1 >= 1.0)
    keep_BV &= sorted_BV >= min_p_B1 * sorted_BV[:, :1]
    keep_BV[:, 0] = True
    return torch.zeros_like(probs_BV).scatter_(1, order_BV, torch.where(keep_BV, sorted_BV, 0.0))
