"""Log-probabilities and entropies of given tokens, from logits or directly from hidden states.

Both functions work chunk by chunk, and the second never holds all logits. A chunk is recomputed in the
backward pass instead of kept. `ChunkKernels` contains the arithmetic of one chunk.
Shapes: A action tokens, V vocabulary, H width of the hidden states, C tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from agentrl.algorithms.logprob_kernels import EAGER, PLAIN_HEAD, ChunkKernels, HeadForm, compute_dtype

Multiply = Callable[..., Tensor]
"""Signature: `f(left f[N, H], right f[M, H], bias f[M] or None) -> left @ right.T + bias`; bias may be left
out.
"""

CPU_CHUNK = 2**24
"""Logits per chunk on a CPU: 64 MiB in float32."""
GPU_CHUNK = 2**27
"""Logits per chunk on a GPU: enough tokens to saturate the tensor cores."""
_CHUNK_ELEMENTS = {"cpu": CPU_CHUNK, "cuda": GPU_CHUNK}


def logprobs_and_entropy(
    logits_AV: Tensor, targets_A: Tensor, *, temperature: float, kernels: ChunkKernels = EAGER
) -> tuple[Tensor, Tensor]:
    """Return log softmax(logits / temperature)[target] and the entropy of that softmax, both with gradient.

    Computed in float32 (float64 for float64 logits).

    Args:
        logits_AV: f[A, V], any floating dtype; A may be 0.
        targets_A: i64[A], ids below V.
        temperature: of the rollout, > 0.

    Returns:
        logprobs_A, entropies_A (nats): f32[A], or f64[A] for float64 logits.
    """
    return _FromLogits.apply(logits_AV, targets_A, temperature, kernels)


def linear_logprobs_and_entropy(
    hidden_AH: Tensor,
    weight_VH: Tensor,
    targets_A: Tensor,
    *,
    temperature: float,
    bias_V: Tensor | None = None,
    form: HeadForm = PLAIN_HEAD,
    chunk_tokens: int | None = None,
    kernels: ChunkKernels = EAGER,
    multiply: Multiply = linear,
) -> tuple[Tensor, Tensor]:
    """Return `logprobs_and_entropy` of the logits `form(hidden @ weight.T + bias)`, one chunk at a time.

    Memory beyond inputs and gradients is a few chunks of logits. If all tokens fit into one chunk, it is kept
    for the backward pass and nothing is recomputed.

    Args:
        hidden_AH: f[A, H]; weight_VH: f[V, H]; bias_V: f[V] or None; all of one dtype. All three receive
            gradients.
        targets_A: i64[A], ids below V.
        temperature: of the rollout, > 0.
        chunk_tokens: tokens per chunk, >= 1; None: by device, see `_CHUNK_ELEMENTS`.
        kernels: arithmetic of one chunk.
        multiply: matrix product with the weight, forward and backward.

    Returns:
        logprobs_A, entropies_A (nats): f32[A], or f64[A] for float64 inputs.
    """
    size = chunk_tokens or _default_chunk(weight_VH)
    return _FromHidden.apply(
        hidden_AH, weight_VH, bias_V, targets_A, temperature, form, size, kernels, multiply
    )


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_AV: Tensor, targets_A: Tensor, temperature: float, kernels: ChunkKernels
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies = _empty_results(logits_AV)
        for chunk in _chunks(len(logits_AV), _default_chunk(logits_AV.T)):
            logprobs[chunk], entropies[chunk] = kernels.values(
                logits_AV[chunk], targets_A[chunk], temperature, PLAIN_HEAD
            )
        ctx.save_for_backward(logits_AV, targets_A, entropies)
        ctx.temperature, ctx.kernels = temperature, kernels
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        logits_AV, targets_A, entropies = ctx.saved_tensors
        grads = _Upstream(targets_A, entropies, grad_logprobs, grad_entropies, ctx.temperature, PLAIN_HEAD)
        grad_logits = torch.zeros_like(logits_AV)
        for rows in grads.rows(_default_chunk(logits_AV.T)):
            grad_logits[rows] = grads.of_rows(ctx.kernels, logits_AV[rows], rows)
        return grad_logits, None, None, None


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
        kernels: ChunkKernels,
        multiply: Multiply,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies = _empty_results(hidden_AH)
        products_CV = None
        for chunk in _chunks(len(hidden_AH), size):
            products_CV = multiply(hidden_AH[chunk], weight_VH, bias_V)
            logprobs[chunk], entropies[chunk] = kernels.values(
                products_CV, targets_A[chunk], temperature, form
            )
        kept = products_CV if len(hidden_AH) <= size else None
        ctx.save_for_backward(hidden_AH, weight_VH, bias_V, targets_A, entropies, kept)
        ctx.temperature, ctx.form, ctx.size = temperature, form, size
        ctx.kernels, ctx.multiply = kernels, multiply
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden_AH, weight_VH, bias_V, targets_A, entropies, kept = ctx.saved_tensors
        grads = _Upstream(targets_A, entropies, grad_logprobs, grad_entropies, ctx.temperature, ctx.form)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden_AH) if needs_hidden else None
        # Accumulate over chunks in float32 (or float64): in bfloat16, rounding would lose the contributions
        # of later chunks.
        grad_weight = torch.zeros_like(weight_VH, dtype=entropies.dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=entropies.dtype) if needs_bias else None
        for rows in grads.rows(ctx.size):
            products_CV = ctx.multiply(hidden_AH[rows], weight_VH, bias_V) if kept is None else kept[rows]
            grad_CV = grads.of_rows(ctx.kernels, products_CV, rows)
            if grad_bias is not None:
                grad_bias += grad_CV.sum(0, dtype=grad_bias.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = ctx.multiply(grad_CV, weight_VH.T)
            if grad_weight is not None:
                _add_product(grad_weight, grad_CV.T, hidden_AH[rows])
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight_VH.dtype),
            None if grad_bias is None else grad_bias.to(bias_V.dtype),
            *(None,) * 6,
        )


class _Upstream:
    """The upstream gradients, and what else a chunk needs to turn them into the gradient of its products."""

    def __init__(
        self,
        targets_A: Tensor,
        entropies_A: Tensor,
        grad_logprobs_A: Tensor,
        grad_entropies_A: Tensor,
        temperature: float,
        form: HeadForm,
    ) -> None:
        self._targets, self._entropies, self._grad_logprobs = targets_A, entropies_A, grad_logprobs_A
        of_entropies_A = grad_entropies_A != 0
        self._has_gradient = of_entropies_A | (grad_logprobs_A != 0)
        # Test once for all chunks: on a GPU, reading the result synchronizes with the device.
        tests = torch.stack([of_entropies_A.any(), self._has_gradient.all()])
        has_entropies, self._has_all = tests.tolist()
        self._grad_entropies = grad_entropies_A if has_entropies else None
        self._temperature, self._form = temperature, form

    def rows(self, size: int) -> list[slice] | list[Tensor]:
        """Return the tokens with a gradient, at most `size` at a time.

        A token with an advantage of 0 usually has none. Its logits are not computed again: if one is
        infinite, 0 times it would be NaN.
        """
        if self._has_all:
            return _chunks(len(self._targets), size)
        found = self._has_gradient.nonzero()[:, 0]
        return list(found.split(size)) if len(found) else []

    def of_rows(self, kernels: ChunkKernels, products_CV: Tensor, rows: slice | Tensor) -> Tensor:
        """Return the gradient of the products of these tokens, f[C, V] in their dtype."""
        return kernels.gradient(
            products_CV,
            self._targets[rows],
            self._entropies[rows],
            self._grad_logprobs[rows],
            None if self._grad_entropies is None else self._grad_entropies[rows],
            self._temperature,
            self._form,
        )


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _empty_results(like: Tensor) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(like)
    return like.new_empty(len(like), dtype=dtype), like.new_empty(len(like), dtype=dtype)


def _default_chunk(weight_VH: Tensor) -> int:
    elements = _CHUNK_ELEMENTS.get(weight_VH.device.type, _CHUNK_ELEMENTS["cpu"])
    return max(1, elements // len(weight_VH))


def _chunks(num_tokens: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, num_tokens, size)]
