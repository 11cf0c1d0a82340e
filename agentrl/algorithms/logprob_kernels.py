"""Forward and backward of one chunk of logits: log-probabilities, entropies, and their gradient.

`EAGER` uses torch operators one by one, each with its own float32 tensor. It is the reference, and the
implementation on a CPU. `compiled()` passes the same formulas through torch.compile, which fuses each into
one kernel (Triton on a GPU). The kernels read the logits in their own dtype and materialize nothing of their
size in float32.
Shapes: C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentrl.errors import ConfigError

KernelChoice = Literal["eager", "compiled"]


@dataclass(frozen=True, slots=True)
class HeadForm:
    """The map from head products to logits: times `scale`, then softcap * tanh(logits / softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, products: Tensor) -> Tensor:
        logits = products * self.scale if self.scale != 1.0 else products
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


PLAIN_HEAD = HeadForm()
"""No scale, no softcap: the products are the logits."""


@dataclass(frozen=True, slots=True)
class ChunkKernels:
    """The two functions of a chunk. Both compute in float32, or in float64 for float64 products.

    values(products_CV, targets_C, temperature, form) -> logprobs_C, entropies_C, in the compute dtype.
    gradient(products_CV, targets_C, entropies_C, grad_logprobs_C, grad_entropies_C, temperature, form) ->
    gradient of the products, f[C, V] in their dtype. grad_entropies_C is None if the loss does not depend on
    the entropies.
    """

    values: Callable[[Tensor, Tensor, float, HeadForm], tuple[Tensor, Tensor]]
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, float, HeadForm], Tensor]


def compute_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def choose_kernels(requested: KernelChoice, *, device: str) -> ChunkKernels:
    """Resolve `learner.logprob_kernels` for a device type (`cpu`, `cuda`).

    Raises:
        ConfigError: see `check_kernels`.
    """
    check_kernels(requested, device=device)
    return compiled() if requested == "compiled" else EAGER


def check_kernels(requested: KernelChoice, *, device: str) -> None:
    """Raise if compiled kernels are requested but cannot be built.

    Raises:
        ConfigError: they are requested on a CPU, or Triton is not installed.
    """
    if requested != "compiled":
        return
    if device != "cuda":
        raise ConfigError(
            f"learner.logprob_kernels=compiled needs a GPU, but the ranks compute on a {device}; use eager"
        )
    if not _has_triton():
        raise ConfigError(
            "learner.logprob_kernels=compiled needs the package triton, which comes with torch for CUDA; "
            "install it, or use eager"
        )


@functools.cache
def compiled(backend: str = "inductor") -> ChunkKernels:
    """Return the formulas compiled by a backend of torch.compile. Compilation happens at the first call.

    torch.compile specializes a graph to the size of the first chunk, and a second graph serves all other
    sizes. Full chunks are the most frequent, so they get the specialized graph.
    """
    return ChunkKernels(torch.compile(_values, backend=backend), torch.compile(_gradient, backend=backend))


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


# -------------------------------------------------------------------------- the formulas, for one kernel each


def _values(
    products_CV: Tensor, targets_C: Tensor, temperature: float, form: HeadForm
) -> tuple[Tensor, Tensor]:
    log_p_CV = _log_softmax(products_CV, temperature, form)
    p_CV = log_p_CV.exp()
    # Select the target by comparison: a gather would force the kernel to write out all log-probabilities
    # first.
    logprobs_C = torch.where(_is_target(p_CV, targets_C), log_p_CV, 0.0).sum(1)
    # Masked-out vocabulary entries have p log p = 0 * -inf, which counts as 0.
    return logprobs_C, -torch.where(p_CV > 0, p_CV * log_p_CV, 0.0).sum(1)


def _gradient(
    products_CV: Tensor,
    targets_C: Tensor,
    entropies_C: Tensor,
    grad_logprobs_C: Tensor,
    grad_entropies_C: Tensor | None,
    temperature: float,
    form: HeadForm,
) -> Tensor:
    log_p_CV = _log_softmax(products_CV, temperature, form)
    p_CV = log_p_CV.exp()
    # z = logits / temperature. d logprob / d z_j = [j = target] - p_j; d entropy / d z_j = -p_j (log p_j +
    # entropy).
    grad_CV = (_is_target(p_CV, targets_C).to(p_CV.dtype) - p_CV) * grad_logprobs_C[:, None]
    if grad_entropies_C is not None:
        surprise_CV = torch.where(p_CV > 0, log_p_CV + entropies_C[:, None], 0.0)
        grad_CV = grad_CV - p_CV * surprise_CV * grad_entropies_C[:, None]
    grad_CV = grad_CV * (form.scale / temperature)
    if form.softcap is not None:
        # d logits / d products = scale * (1 - tanh^2). Recompute tanh from the products: reusing the logits
        # would mean storing them.
        grad_CV = grad_CV * (1 - torch.tanh(products_CV.to(p_CV.dtype) * form.scale / form.softcap).square())
    return grad_CV.to(products_CV.dtype)


def _is_target(like_CV: Tensor, targets_C: Tensor) -> Tensor:
    return torch.arange(like_CV.shape[1], device=like_CV.device) == targets_C[:, None]


def _log_softmax(products_CV: Tensor, temperature: float, form: HeadForm) -> Tensor:
    return torch.log_softmax(
        _over(form.apply(products_CV.to(compute_dtype(products_CV))), temperature), dim=1
    )


def _over(values: Tensor, temperature: float) -> Tensor:
    """Return values / temperature. At temperature 1, the usual value in training, this saves a pass over all
    logits.
    """
    return values if temperature == 1.0 else values / temperature


# ----------------------------------------------------------------------------- the same, operator by operator


def _eager_values(
    products_CV: Tensor, targets_C: Tensor, temperature: float, form: HeadForm
) -> tuple[Tensor, Tensor]:
    log_p_CV = _log_softmax(products_CV, temperature, form)
    logprobs_C = log_p_CV.gather(1, targets_C[:, None]).squeeze(1)
    # 0 * -inf counts as 0. This hides no error: where logits are not finite, the log-probability is NaN as
    # well.
    return logprobs_C, -log_p_CV.exp().mul_(log_p_CV).nan_to_num_(nan=0.0).sum(1)


def _eager_gradient(
    products_CV: Tensor,
    targets_C: Tensor,
    entropies_C: Tensor,
    grad_logprobs_C: Tensor,
    grad_entropies_C: Tensor | None,
    temperature: float,
    form: HeadForm,
) -> Tensor:
    # Every pass is bound by memory bandwidth, so write in place where the old values are no longer needed.
    logits_CV = form.apply(products_CV.to(compute_dtype(products_CV)))
    scaled_CV, upstream_C = _over(logits_CV, temperature), _over(grad_logprobs_C, temperature)
    p_CV = torch.softmax(scaled_CV, dim=1)
    if grad_entropies_C is None:
        grad_CV = p_CV.mul_(-upstream_C[:, None])
    else:
        # d entropy / d z_j = -p_j (log p_j + entropy); p_j = 0 contributes 0, not 0 * -inf.
        surprise_CV = torch.where(p_CV > 0, torch.log_softmax(scaled_CV, dim=1) + entropies_C[:, None], 0.0)
        grad_CV = -p_CV * (upstream_C[:, None] + surprise_CV * _over(grad_entropies_C, temperature)[:, None])
    grad_CV.scatter_add_(1, targets_C[:, None], upstream_C[:, None])
    if form.softcap is not None:
        grad_CV *= 1 - (logits_CV / form.softcap).square()
    if form.scale != 1.0:
        grad_CV *= form.scale
    return grad_CV.to(products_CV.dtype)


EAGER = ChunkKernels(_eager_values, _eager_gradient)
