"""Float32 linear layers on a CPU through oneDNN, where torch's BLAS uses only half of the vector width.

torch multiplies float32 matrices with MKL, which uses 256 of the 512 vector bits of an AMD processor. oneDNN,
which torch ships for other dtypes, uses all of them. On one thread of a Zen 5 (forward and backward of 512
tokens, 896 to 4,864 columns) it takes 63 ms instead of 146 ms.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.algorithms.logprobs import Multiply

LinearKernels = Literal["auto", "torch", "onednn"]

_CPUINFO = Path("/proc/cpuinfo")
_MIN_PRODUCTS = 2**20
"""Multiplications above which oneDNN is faster; below, its call overhead dominates."""


def use_linear_kernels(module: nn.Module, requested: LinearKernels, *, device: str) -> None:
    """Make the linear layers of `module` use the `requested` kernels, in place.

    Call it before anything wraps the layers.

    Layers whose weights are not float32, or are sharded over ranks, keep torch's own.
    """
    check_linear_kernels(requested, device=device)
    if requested == "onednn" or (requested == "auto" and device == "cpu" and _is_faster() and _has_onednn()):
        for child in module.modules():
            if type(child) is nn.Linear:
                child.__class__ = OneDnnLinear


def check_linear_kernels(requested: LinearKernels, *, device: str) -> None:
    """Raise if the requested kernels are not available.

    Raises:
        ConfigError: oneDNN is requested on a GPU, or torch was built without it.
    """
    if requested != "onednn":
        return
    if device != "cpu":
        raise ConfigError(f"onednn works only on CPUs, and this is a {device}; use auto")
    if not _has_onednn():
        raise ConfigError("onednn needs a torch that was built with oneDNN; use auto")


class OneDnnLinear(nn.Linear):
    """A linear layer that computes its larger float32 products with oneDNN."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.is_worthwhile(input):
            return super().forward(input)
        product: Tensor = _Product.apply(input, self.weight, self.bias)
        return product

    def is_worthwhile(self, input: Tensor) -> bool:
        """Return whether oneDNN takes these operands and is faster than torch's BLAS."""
        is_plain = (
            type(self.weight) in (Tensor, nn.Parameter)
            and self.weight.dtype == input.dtype == torch.float32
            and self.weight.device.type == "cpu"
        )
        return is_plain and input.numel() * self.out_features >= _MIN_PRODUCTS


def multiplication_of(layer: nn.Module, input: Tensor) -> Multiply:
    """Return the function (left, right, bias) -> left @ right.T + bias that `layer` uses for `input`."""
    is_onednn = isinstance(layer, OneDnnLinear) and layer.is_worthwhile(input)
    return _multiply if is_onednn else linear


class _Product(torch.autograd.Function):
    """x W^T + b with x f32[..., in], W f32[out, in], b f32[out] or None."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return _multiply(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        # For y = x W^T + b: dL/dx = g W, dL/dW = g^T x, dL/db = the sum of g over rows.
        grad_rows, rows = grad.reshape(-1, grad.shape[-1]), input.reshape(-1, input.shape[-1])
        return (
            _multiply(grad, weight.T) if needs_input else None,
            _multiply(grad_rows.T, rows.T) if needs_weight else None,
            grad_rows.sum(0) if needs_bias else None,
        )


def _multiply(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left @ right.T + bias."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return product


@functools.cache
def _is_faster() -> bool:
    return (
        "AVX512" in torch.backends.cpu.get_cpu_capability()
        and _CPUINFO.is_file()
        and "AuthenticAMD" in _CPUINFO.read_text(errors="replace")
    )


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
