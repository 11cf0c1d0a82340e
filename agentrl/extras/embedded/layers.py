"""Linear layers of a served model, which compute with a copy of their weights in another form.

The model's own weights stay: updates and checksums are about them. A layer's copy is made again before its
first product after they were written to.

- oneDNN's own layout (float32): it otherwise rearranges the weights at each product, which costs as much as
  the product of a few requests.
- 8-bit integers: with one scale per output for weights and one per token for inputs, so what is sampled for
  one request does not depend on the others of its batch. The output head stays as it is, because its rounding
  would be an error of the log-probabilities themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.algorithms.linear_kernels import LinearKernels, OneDnnLinear, use_linear_kernels
from agentrl.errors import ConfigError

T = TypeVar("T")

_LARGEST = 127
_SMALLEST_SCALE = 1e-30
"""Scale of a row of zeros."""
_USUAL_ROWS = 32
"""Tokens of a product, for which oneDNN chooses its layout; the layout is right for any number."""


def prepare_layers(
    model: PreTrainedModel, kernels: LinearKernels, quantization: Literal["none", "int8"]
) -> None:
    """Make the linear layers of `model` compute as the config says, in place.

    Raises:
        ConfigError: this device or processor does not have what is asked for.
    """
    if quantization == "int8":
        _use_int8(model)
    use_linear_kernels(model, kernels, device=model.device.type)
    for layer in model.modules():
        if type(layer) is OneDnnLinear:
            layer.__class__ = PackedLinear


def has_int8_instructions() -> bool:
    """Return whether this processor multiplies and adds 8-bit integers in one instruction."""
    known = torch.cpu.get_capabilities()
    return known.get("architecture") != "x86_64" or bool(known.get("avx512_vnni") or known.get("avx_vnni"))


class _Copied:
    """Keeps a form of a layer's weight. The layer must not be trained."""

    weight: Tensor
    _copy: ClassVar[tuple[int, Any] | None] = None
    """Version of the weight, and its form; set in instances."""

    def _form(self, make: Callable[[Tensor], T]) -> T:
        """Return the weight in the form that `make` gives it, made anew if the weight was written to."""
        copy, version = self._copy, self.weight._version
        if copy is None or copy[0] != version:
            copy = version, make(self.weight.detach())
            self.__dict__["_copy"] = copy
        form: T = copy[1]
        return form


class PackedLinear(_Copied, OneDnnLinear):
    """A layer whose larger float32 products are oneDNN's, with a weight in oneDNN's layout."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.is_worthwhile(input):
            return nn.Linear.forward(self, input)
        weight = self._form(_packed)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, self.bias, "none", [], "")
        return product


class Int8Linear(_Copied, nn.Linear):
    """A layer whose products are of 8-bit integers, summed in 32 bits."""

    def forward(self, input: Tensor) -> Tensor:
        """x W^T + b for x [..., in]; not finite where an input or a weight is not."""
        values, weight_scales = self._form(_rounded)
        rows, scales = _round_rows(input.reshape(-1, self.in_features).float())
        product = torch._int_mm(rows, values).float().mul_(scales).mul_(weight_scales)
        if self.bias is not None:
            product += self.bias
        return product.to(input.dtype).view(*input.shape[:-1], self.out_features)


def _use_int8(model: PreTrainedModel) -> None:
    if model.device.type != "cpu":
        raise ConfigError(
            f"quantization=int8 works only on CPUs, and this is a {model.device.type}; use none"
        )
    if not has_int8_instructions():
        raise ConfigError(
            "quantization=int8 needs a processor with VNNI (avx512_vnni or avx_vnni in /proc/cpuinfo); use "
            "none, or dtype bfloat16"
        )
    head = model.get_output_embeddings()
    for layer in model.modules():
        # torch 2.13 returns wrong integer products of matrices with one column.
        if isinstance(layer, nn.Linear) and layer is not head and layer.in_features > 1:
            layer.__class__ = Int8Linear


def _packed(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _USUAL_ROWS)
    return packed


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return i8[in, out] and the scales f32[out] of the columns, for a weight [out, in]."""
    values, scales = _round_rows(weight.float())
    return values.t().contiguous(), scales[:, 0]


def _round_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return i8[n, m] and scales f32[n, 1], whose product is nearest to f32[n, m]."""
    scales = rows.abs().amax(1, keepdim=True).div_(_LARGEST).clamp_(min=_SMALLEST_SCALE)
    return (rows / scales).round_().to(torch.int8), scales
