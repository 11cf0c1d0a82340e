"""Linear layers of a served model in int8: a third of the time of float32 on a CPU that has the instructions.

Weights are rounded to 8 bits with one scale per output, inputs with one scale per token, so what is sampled
for one request does not depend on the others of its batch. The model's own weights stay: updates and
checksums are about them, and the 8-bit copy of a layer is made again before its next product. The output head
stays as it is, because its rounding would be an error of the log-probabilities themselves.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.errors import ConfigError

_LARGEST = 127
_SMALLEST_SCALE = 1e-30
"""Scale of a row of zeros."""


def use_int8(model: PreTrainedModel) -> None:
    """Make all linear layers of `model` but its output head compute in int8, in place.

    Raises:
        ConfigError: the model is on a GPU, or this processor multiplies 8-bit integers no faster than floats.
    """
    if model.device.type != "cpu":
        raise ConfigError(
            f"quantization=int8 works only on CPUs, and this is a {model.device.type}; use none"
        )
    if not has_instructions():
        raise ConfigError(
            "quantization=int8 needs a processor with VNNI (avx512_vnni or avx_vnni in /proc/cpuinfo); use "
            "none, or dtype bfloat16"
        )
    head = model.get_output_embeddings()
    for layer in model.modules():
        # torch 2.13 returns wrong integer products of matrices with one column.
        if isinstance(layer, nn.Linear) and layer is not head and layer.in_features > 1:
            layer.__class__ = Int8Linear


def has_instructions() -> bool:
    """Return whether this processor multiplies and adds 8-bit integers in one instruction."""
    known = torch.cpu.get_capabilities()
    return known.get("architecture") != "x86_64" or bool(known.get("avx512_vnni") or known.get("avx_vnni"))


class Int8Linear(nn.Linear):
    """A frozen linear layer whose products are of 8-bit integers, summed in 32 bits."""

    _rounded: ClassVar[tuple[int, Tensor, Tensor] | None] = None
    """Version of the weight, its rounded values i8[in, out] and their scales f32[out]; set in instances."""

    def forward(self, input: Tensor) -> Tensor:
        """x W^T + b for x [..., in]; not finite where an input or a weight is not."""
        values, weight_scales = self._weight()
        rows = input.reshape(-1, self.in_features).float()
        rounded, scales = round_rows(rows)
        product = torch._int_mm(rounded, values).float().mul_(scales).mul_(weight_scales)
        if self.bias is not None:
            product += self.bias
        return product.to(input.dtype).view(*input.shape[:-1], self.out_features)

    def _weight(self) -> tuple[Tensor, Tensor]:
        """Return the rounded weight and its scales, made anew if the weight was written to."""
        version = self.weight._version
        if self._rounded is None or self._rounded[0] != version:
            values, scales = round_rows(self.weight.detach().float())
            self.__dict__["_rounded"] = (version, values.t().contiguous(), scales[:, 0])
        assert self._rounded is not None
        return self._rounded[1:]


def round_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return i8[n, m] and scales f32[n, 1], whose product is nearest to f32[n, m]."""
    scales = rows.abs().amax(1, keepdim=True).div_(_LARGEST).clamp_(min=_SMALLEST_SCALE)
    return (rows / scales).round_().to(torch.int8), scales
