"""LoRA: beside a frozen weight W of shape [O, I] stands an adapter, and the layer computes with W + alpha / rank * B A.

`peft` makes the layers. The learner trains A and B, computes the reference policy with the adapter switched off, and publishes either
the adapter alone, in peft's folder format, or the sum under the name of W; exported models are sums.

Source: Hu et al. 2021, arXiv:2106.09685.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agentrl.config.model import LoRAConfig
from agentrl.errors import ConfigError
from agentrl.learner.score_head import SCORE_HEAD

if TYPE_CHECKING:  # seconds to import, and the controller names what ranks do without doing it
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer
    from transformers import PreTrainedModel

_ADAPTER = "default"
_ALL_LINEAR = "all-linear"
_BASE_LAYER = ".base_layer."


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The adapter of one weight: down_RI (A), up_OR (B); `is_transposed` where the weight is stored as [I, O]."""

    down: Tensor
    up: Tensor
    scale: float
    is_transposed: bool

    @torch.no_grad()
    def product(self) -> Tensor:
        """Return scale * B A in the shape and on the device of the weight, in the adapter's dtype. A collective when sharded."""
        product = self.scale * (gather(self.up) @ gather(self.down))
        return product.T if self.is_transposed else product


def gather(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that may be sharded. A collective when it is."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def add_adapter(module: PreTrainedModel, config: LoRAConfig, *, dtype: torch.dtype) -> None:
    """Put adapters into the linear layers that `config` names, by the current seed, and freeze all other weights.

    The head of a reward model gets none: it is new, so that it is trained itself (`attach_score_head`).
    At first B is zero: the model computes what it computed without. `dtype` is that of the adapter's weights.

    Raises:
        ConfigError: no linear layer of the model has such a name.
    """
    from peft import inject_adapter_in_model

    described = _peft_config(config)
    described.exclude_modules = [SCORE_HEAD] if hasattr(module, SCORE_HEAD) else None
    try:
        inject_adapter_in_model(described, module, _ADAPTER)
    except ValueError as error:
        raise ConfigError(f"model.lora.target_modules={list(config.target_modules)} does not fit the model: {error}") from error
    strange = [name for name, layer in _layers(module) if not layer.lora_A]
    if strange:
        raise ConfigError(f"model.lora.target_modules names {strange[0]!r}, which is no linear layer; adapters stand beside those alone")
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def published_name(name: str) -> str | None:
    """Return the name of a weight as it is without adapters; None for a part of an adapter."""
    return None if ".lora_" in name else name.replace(_BASE_LAYER, ".")


def low_ranks(module: nn.Module) -> Mapping[str, LowRank]:
    """Return the adapter of each weight that has one, by the weight's published name."""
    found = {}
    for name, layer in _layers(module):
        down, up = layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
        assert isinstance(down, Tensor), name
        assert isinstance(up, Tensor), name
        found[f"{name}.weight"] = LowRank(down, up, float(layer.scaling[_ADAPTER]), bool(getattr(layer, "fan_in_fan_out", False)))
    return found


@contextmanager
def switched_off(module: nn.Module) -> Iterator[None]:
    """Let the module compute without its adapters: the policy as it was before training."""
    layers = [layer for _, layer in _layers(module)]
    # Not by peft's enable_adapters: that also toggles requires_grad, which FSDP remembers from the first forward on.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapter_tensors(adapters: Mapping[str, LowRank]) -> dict[str, Tensor]:
    """Return A and B of every adapter by the names of peft's files; sharded where the model is."""
    tensors = {}
    for name, adapter in adapters.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{layer}.lora_A.weight"] = adapter.down
        tensors[f"{layer}.lora_B.weight"] = adapter.up
    return tensors


def write_adapter(tensors: Mapping[str, Tensor], config: LoRAConfig, base: str, folder: Path) -> None:
    """Write whole `adapter_tensors` as peft reads them: adapter_config.json and adapter_model.safetensors."""
    described = _peft_config(config)
    described.base_model_name_or_path = base
    described.inference_mode = True
    described.target_modules = sorted({name.rsplit(".", 3)[1] for name in tensors})
    described.save_pretrained(str(folder))
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, str(file), metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors makes it private; a server may run under another account


def _peft_config(config: LoRAConfig) -> LoraConfig:
    from peft import LoraConfig

    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft divides by the rank, fractions are as good
        lora_dropout=config.dropout,
        target_modules=list(config.target_modules) or _ALL_LINEAR,
        task_type="CAUSAL_LM",
    )


def _layers(module: nn.Module) -> list[tuple[str, LoraLayer]]:
    from peft.tuners.lora import LoraLayer

    return [(name, layer) for name, layer in module.named_modules() if isinstance(layer, LoraLayer)]
