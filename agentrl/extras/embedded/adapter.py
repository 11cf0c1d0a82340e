"""LoRA adapters of the served model: each checked as a whole, then computed unmerged, x W + scale * x A B.

There are two reasons not to merge. The learner computes it unmerged too: in bfloat16, a merged weight is
rounded to its own precision, and the effect of a small step is lost. And the base weights need no second copy
from which to start the next adapter. Requests with different adapters, and without one, share a forward: a
mask over the packed tokens selects those that use each.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from agentrl.extras.embedded.bounded_repr import shown
from agentrl.extras.embedded.weights import WeightsRefused, check_finite, reading
from agentrl.servers.process_group import tensor_checksum

_NAME = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<half>[AB])\.weight")
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "modules_to_save": (None, []),
}
"""Fields of adapter_config.json that change the computation, with the values that do not."""


@dataclass(frozen=True, slots=True, eq=False)
class LowRankPair:
    """The adapter of one layer: down_RI (A), up_OR (B). R rank, I inputs, O outputs."""

    down: Tensor
    up: Tensor
    scale: float

    def product(self, x: Tensor) -> Tensor:
        return linear(linear(x, self.down), self.up) * self.scale


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A checked adapter, in the served model's dtype and on its device."""

    pairs: Mapping[str, LowRankPair]

    def checksums(self) -> dict[str, str]:
        """Return {name in peft's file: sha256 of the bytes}."""
        halves = {"A": "down", "B": "up"}
        return {
            f"base_model.model.{layer}.lora_{half}.weight": tensor_checksum(getattr(pair, field))
            for layer, pair in self.pairs.items()
            for half, field in halves.items()
        }


class AdapterSlots:
    """The adapters in a model's linear layers, by name. Change them only while the generation thread is
    parked.
    """

    def __init__(self, model: PreTrainedModel, *, max_rank: int) -> None:
        self._model = model
        self._max_rank = max_rank
        self._hooks: dict[str, list[torch.utils.hooks.RemovableHandle]] = {}
        self._rows: Sequence[tuple[int, str | None]] = ()

    def read(self, folder: str) -> Adapter:
        """Read an adapter in peft's format; raise WeightsRefused if it does not fit the model."""
        scale = _read_scale(Path(folder), max_rank=self._max_rank)
        file = Path(folder) / "adapter_model.safetensors"
        with reading(file):
            tensors = load_file(file)
        layers = {
            name: module for name, module in self._model.named_modules() if isinstance(module, nn.Linear)
        }
        return Adapter(
            {name: self._pair(name, halves, layers, scale) for name, halves in _by_layer(tensors).items()}
        )

    def _pair(
        self, name: str, halves: Mapping[str, Tensor], layers: Mapping[str, nn.Linear], scale: float
    ) -> LowRankPair:
        layer = layers.get(name)
        if layer is None or layer is self._model.get_output_embeddings():
            raise WeightsRefused(
                f"{shown(name)} is not a linear layer of this model that can have an adapter"
            )
        if set(halves) != {"A", "B"}:
            raise WeightsRefused(
                f"the adapter of {name!r} has lora_{min(halves)} alone; it takes lora_A and lora_B"
            )
        if any(tensor.ndim != 2 or not tensor.is_floating_point() for tensor in halves.values()):
            raise WeightsRefused(f"the adapter of {name!r} must be two matrices of floating-point numbers")
        rank = halves["A"].shape[0]
        expected = [(rank, layer.in_features), (layer.out_features, rank)]
        found = [tuple(halves[half].shape) for half in "AB"]
        if found != expected or rank > self._max_rank:
            raise WeightsRefused(
                f"the adapter of {name!r} has the shapes {found}; this model takes {expected}, rank <= "
                f"{self._max_rank}"
            )
        down, up = (halves[half].to(layer.weight.device, layer.weight.dtype) for half in "AB")
        check_finite({f"{name}.lora_A": down, f"{name}.lora_B": up})
        return LowRankPair(down, up, scale)

    def put(self, name: str, adapter: Adapter) -> None:
        """Let requests that name it use `adapter`, from the next forward on."""
        assert name not in self._hooks, "the name is taken"
        self._hooks[name] = [
            self._model.get_submodule(layer).register_forward_hook(partial(self._add, name, pair))
            for layer, pair in adapter.pairs.items()
        ]

    def remove(self, name: str) -> None:
        """Forget an adapter, which no request may use any more."""
        for hook in self._hooks.pop(name):
            hook.remove()

    def expect(self, rows: Sequence[tuple[int, str | None]]) -> None:
        """Set the packing of the next forward: per request, its tokens and its adapter's name, if any."""
        self._rows = rows

    def _add(
        self, adapter: str, pair: LowRankPair, layer: nn.Module, inputs: tuple[Tensor], output: Tensor
    ) -> Tensor | None:
        x = inputs[0]
        if not any(name == adapter for _, name in self._rows):
            return None
        if all(name == adapter for _, name in self._rows):
            return output + pair.product(x)
        # False for the padding after the requests.
        mask_T = torch.zeros(x.shape[-2], 1, dtype=torch.bool, device=x.device)
        start = 0
        for num_tokens, name in self._rows:
            mask_T[start : start + num_tokens] = name == adapter
            start += num_tokens
        return torch.where(mask_T, output + pair.product(x), output)


def _read_scale(folder: Path, *, max_rank: int) -> float:
    """Return the scale alpha / rank of adapter_config.json; raise WeightsRefused for other variants."""
    file = folder / "adapter_config.json"
    with reading(file):
        described = json.loads(file.read_text(encoding="utf-8"))
        rank, alpha = int(described["r"]), float(described["lora_alpha"])
    if not 1 <= rank <= max_rank:
        raise WeightsRefused(
            f"the adapter has rank {rank}; this server takes 1 to {max_rank} (--max-lora-rank)"
        )
    strange = [name for name, plain in _PLAIN.items() if described.get(name) not in plain]
    if strange:
        raise WeightsRefused(
            f"the adapter sets {strange[0]}={shown(described[strange[0]])}, which this server does not "
            "compute"
        )
    if not math.isfinite(alpha):
        raise WeightsRefused(f"{file}: lora_alpha={alpha} must be a finite number")
    return alpha / (rank**0.5 if described.get("use_rslora") else rank)


def _by_layer(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise WeightsRefused(f"{shown(name)} is no tensor of a LoRA adapter in peft's format")
        layers.setdefault(match["layer"], {})[match["half"]] = tensor
    if not layers:
        raise WeightsRefused("the adapter has no tensors")
    return layers
