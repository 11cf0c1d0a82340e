"""Log-probabilities and entropies of given tokens, without a second full copy of the logits.

Shapes: A action tokens, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 2**24
"""Logits worked on at once: 64 MiB in float32, small beside any model whose vocabulary needs more than one chunk."""


def logprobs_and_entropy(logits_AV: Tensor, targets_A: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log softmax(logits / temperature)[target] and the entropy of that softmax, both with gradient.

    Computed in float32 (float64 for float64 logits), chunk by chunk; the backward pass computes the softmax again instead
    of keeping it.

    Args:
        logits_AV: f[A, V], any floating dtype; A may be 0.
        targets_A: i64[A], ids below V.
        temperature: of the rollout, > 0.

    Returns:
        logprobs_A, entropies_A (nats): f32[A], or f64[A] for float64 logits.
    """
    return _LogProbsAndEntropy.apply(logits_AV, targets_A, temperature)


class _LogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_AV: Tensor, targets_A: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        dtype = _compute_dtype(logits_AV)
        logprobs, entropies = (torch.empty(len(logits_AV), dtype=dtype, device=logits_AV.device) for _ in range(2))
        for chunk in _chunks(logits_AV):
            log_p_CV = torch.log_softmax(logits_AV[chunk].to(dtype) / temperature, dim=-1)
            logprobs[chunk] = log_p_CV.gather(-1, targets_A[chunk, None]).squeeze(-1)
            entropies[chunk] = _entropy(log_p_CV)
        ctx.save_for_backward(logits_AV, targets_A, entropies)
        ctx.temperature = temperature
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad_logprobs, grad_entropies = grads
        logits_AV, targets_A, entropies = ctx.saved_tensors
        grad_logits = torch.empty_like(logits_AV)
        for chunk in _chunks(logits_AV):
            log_p_CV = torch.log_softmax(logits_AV[chunk].to(entropies.dtype) / ctx.temperature, dim=-1)
            p_CV = log_p_CV.exp()
            grad_CV = -p_CV * grad_logprobs[chunk, None]
            grad_CV.scatter_add_(-1, targets_A[chunk, None], grad_logprobs[chunk, None])
            # d entropy / d logit_j = -p_j (log p_j + entropy); p_j = 0 contributes 0, not 0 * -inf.
            surprise_CV = torch.where(p_CV > 0, log_p_CV + entropies[chunk, None], 0.0)
            grad_CV -= p_CV * surprise_CV * grad_entropies[chunk, None]
            grad_logits[chunk] = (grad_CV / ctx.temperature).to(grad_logits.dtype)
        return grad_logits, None, None


def _entropy(log_p_CV: Tensor) -> Tensor:
    p_CV = log_p_CV.exp()
    return -torch.where(p_CV > 0, p_CV * log_p_CV, 0.0).sum(-1)


def _compute_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _chunks(logits_AV: Tensor) -> list[slice]:
    num_tokens, vocabulary = logits_AV.shape
    size = max(1, _CHUNK_ELEMENTS // vocabulary)
    return [slice(start, start + size) for start in range(0, num_tokens, size)]
