"""Log-probabilities and entropies of given tokens, from logits or, without ever holding all logits, from hidden states.

Both work chunk by chunk and compute a chunk again in the backward pass instead of keeping it.
Shapes: A action tokens, V vocabulary, H width of the hidden states, C tokens of one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

_CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**27}
"""Logits worked on at once by device type: 64 MiB in float32 on a CPU, and on a GPU enough rows to keep its matrix units busy."""


def logprobs_and_entropy(logits_AV: Tensor, targets_A: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log softmax(logits / temperature)[target] and the entropy of that softmax, both with gradient.

    Computed in float32 (float64 for float64 logits).

    Args:
        logits_AV: f[A, V], any floating dtype; A may be 0.
        targets_A: i64[A], ids below V.
        temperature: of the rollout, > 0.

    Returns:
        logprobs_A, entropies_A (nats): f32[A], or f64[A] for float64 logits.
    """
    return _FromLogits.apply(logits_AV, targets_A, temperature)


@dataclass(frozen=True, slots=True)
class HeadForm:
    """What a model does to the product of hidden states and head: times `scale`, then softcap * tanh(logits / softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, products: Tensor) -> Tensor:
        logits = products * self.scale if self.scale != 1.0 else products
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def pull_back(self, grad_CV: Tensor, logits_CV: Tensor) -> Tensor:
        """Turn the gradient of the logits, in place, into that of the products."""
        if self.softcap is not None:
            grad_CV *= 1 - (logits_CV / self.softcap).square()
        return grad_CV.mul_(self.scale) if self.scale != 1.0 else grad_CV


def linear_logprobs_and_entropy(
    hidden_AH: Tensor,
    weight_VH: Tensor,
    targets_A: Tensor,
    *,
    temperature: float,
    bias_V: Tensor | None = None,
    form: HeadForm = HeadForm(),
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what `logprobs_and_entropy` returns for the logits `form(hidden @ weight.T + bias)`, which never exist as a whole.

    Memory beyond inputs and gradients is a few chunks of logits. When all tokens fit one chunk it is kept, and nothing is
    computed twice.

    Args:
        hidden_AH: f[A, H]; weight_VH: f[V, H]; bias_V: f[V] or None; one dtype. Gradients flow into all three.
        targets_A: i64[A], ids below V.
        temperature: of the rollout, > 0.
        chunk_tokens: tokens per chunk, >= 1; None: by device, see `_CHUNK_ELEMENTS`.

    Returns:
        logprobs_A, entropies_A (nats): f32[A], or f64[A] for float64 inputs.
    """
    size = chunk_tokens or _default_chunk(weight_VH)
    return _FromHidden.apply(hidden_AH, weight_VH, bias_V, targets_A, temperature, form, size)


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_AV: Tensor, targets_A: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logprobs, entropies = _empty_results(logits_AV)
        for chunk in _chunks(len(logits_AV), _default_chunk(logits_AV.T)):
            log_p_CV = _log_softmax(logits_AV[chunk], temperature)
            _write_results(logprobs, entropies, chunk, log_p_CV, targets_A)
        ctx.save_for_backward(logits_AV, targets_A, entropies)
        ctx.temperature = temperature
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits_AV, targets_A, entropies = ctx.saved_tensors
        grad_logits = torch.empty_like(logits_AV)
        for chunk in _chunks(len(logits_AV), _default_chunk(logits_AV.T)):
            log_p_CV = _log_softmax(logits_AV[chunk], ctx.temperature)
            grad_CV = _logits_gradient(log_p_CV, targets_A[chunk], entropies[chunk], *(grad[chunk] for grad in grads))
            grad_logits[chunk] = (grad_CV / ctx.temperature).to(grad_logits.dtype)
        return grad_logits, None, None


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_AH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_A: Tensor,
        temperature: float,
        form: HeadForm,
        size: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies = _empty_results(hidden_AH)
        logits_CV = None
        for chunk in _chunks(len(hidden_AH), size):
            logits_CV = _project(hidden_AH[chunk], weight_VH, bias_V, form)
            _write_results(logprobs, entropies, chunk, _log_softmax(logits_CV, temperature), targets_A)
        kept = logits_CV if len(hidden_AH) <= size else None
        ctx.save_for_backward(hidden_AH, weight_VH, bias_V, targets_A, entropies, kept)
        ctx.temperature, ctx.form, ctx.size = temperature, form, size
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_AH, weight_VH, bias_V, targets_A, entropies, kept = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden_AH) if needs_hidden else None
        # Sums over chunks are kept in the dtype of the results: in bfloat16 each further chunk would round away what the last ones added.
        grad_weight = torch.zeros_like(weight_VH, dtype=entropies.dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=entropies.dtype) if needs_bias else None
        for chunk in _chunks(len(hidden_AH), ctx.size):
            logits_CV = _project(hidden_AH[chunk], weight_VH, bias_V, ctx.form) if kept is None else kept
            log_p_CV = _log_softmax(logits_CV, ctx.temperature)
            grad_CV = _logits_gradient(log_p_CV, targets_A[chunk], entropies[chunk], *(grad[chunk] for grad in grads))
            grad_CV = ctx.form.pull_back(grad_CV.div_(ctx.temperature), logits_CV)
            if grad_bias is not None:
                grad_bias += grad_CV.sum(0)
            grad_CV = grad_CV.to(hidden_AH.dtype)
            if grad_hidden is not None:
                torch.mm(grad_CV, weight_VH, out=grad_hidden[chunk])
            if grad_weight is not None:
                _add_product(grad_weight, grad_CV.T, hidden_AH[chunk])
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight_VH.dtype),
            None if grad_bias is None else grad_bias.to(bias_V.dtype),
            *(None,) * 4,
        )


def _project(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, form: HeadForm) -> Tensor:
    return form.apply(linear(hidden_CH, weight_VH, bias_V).to(_compute_dtype(hidden_CH)))


def _log_softmax(logits_CV: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(logits_CV.to(_compute_dtype(logits_CV)) / temperature, dim=-1)


def _write_results(logprobs: Tensor, entropies: Tensor, chunk: slice, log_p_CV: Tensor, targets_A: Tensor) -> None:
    logprobs[chunk] = log_p_CV.gather(-1, targets_A[chunk, None]).squeeze(-1)
    # 0 * -inf is 0 here. Where logits are not finite the log-probability is NaN as well, so nothing is hidden by it.
    entropies[chunk] = -log_p_CV.exp().mul_(log_p_CV).nan_to_num_(nan=0.0).sum(-1)


def _logits_gradient(log_p_CV: Tensor, targets_C: Tensor, entropies_C: Tensor, grad_logprobs_C: Tensor, grad_entropies_C: Tensor) -> Tensor:
    """Return the gradient of logits / temperature, f[C, V]."""
    p_CV = log_p_CV.exp()
    grad_CV = p_CV * -grad_logprobs_C[:, None]
    grad_CV.scatter_add_(-1, targets_C[:, None], grad_logprobs_C[:, None])
    if bool((grad_entropies_C != 0).any()):
        # d entropy / d logit_j = -p_j (log p_j + entropy); p_j = 0 contributes 0, not 0 * -inf.
        surprise_CV = torch.where(p_CV > 0, log_p_CV + entropies_C[:, None], 0.0)
        grad_CV -= p_CV * surprise_CV * grad_entropies_C[:, None]
    return grad_CV


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _empty_results(like: Tensor) -> tuple[Tensor, Tensor]:
    dtype = _compute_dtype(like)
    return like.new_empty(len(like), dtype=dtype), like.new_empty(len(like), dtype=dtype)


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _default_chunk(weight_VH: Tensor) -> int:
    elements = _CHUNK_ELEMENTS.get(weight_VH.device.type, _CHUNK_ELEMENTS["cpu"])
    return max(1, elements // len(weight_VH))


def _chunks(num_tokens: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]
