"""LoRA: a frozen weight W of shape [O, I] gets an adapter; the layer computes with W + alpha / rank * B A.

`peft` builds the layers. The learner trains A and B, and computes the reference policy with the adapter
switched off. It publishes either the adapter alone, in peft's folder format, or the merged sum under the name
of W. Exported models are merged.

Conversations of a role (`model.lora.roles`) have an adapter of their own beside the policy's, in the same
layers. All are computed for all tokens of a microbatch, each on the tokens of its role, on zeros elsewhere.
So every rank has a gradient for every adapter, whatever its microbatches hold.

Source: Hu et al. 2021, arXiv:2106.09685.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from agentrl.config.model import LoRAConfig
from agentrl.data.adapter_source import WEIGHTS_FILE
from agentrl.errors import ConfigError
from agentrl.learner.batch import Microbatch
from agentrl.learner.score_head import SCORE_HEAD
from agentrl.learner.sharding import gather, own_part, put

if TYPE_CHECKING:  # takes seconds to import; the controller needs only the names of this module
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer
    from transformers import PreTrainedModel

_ADAPTER = "default"
_ALL_LINEAR = "all-linear"
_BASE_LAYER = ".base_layer."


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The adapter of one weight of shape [O, I] and rank R.

    down: f[R, I], A. up: f[O, R], B. scale: alpha / rank.
    is_transposed: True if the weight is stored as [I, O].
    """

    down: Tensor
    up: Tensor
    scale: float
    is_transposed: bool

    @torch.no_grad()
    def product(self) -> Tensor:
        """Return scale * B A, with the shape and device of the weight, in the adapter's dtype.

        A collective if sharded.
        """
        product = self.scale * (gather(self.up) @ gather(self.down))
        return product.T if self.is_transposed else product


@dataclass(slots=True, eq=False)
class TokenRoles:
    """Which adapter the tokens of a forward have. Valid from the forward to the end of its backward, which
    may compute layers again.

    names: of the roles. roles: place in `names` of the conversations that have one, by name.
    current_T: i64[T], the place in `names` of each token's role, -1 for the policy's own adapter; None: that
        one for all.
    """

    names: tuple[str, ...] = ()
    roles: Mapping[str, int] = field(default_factory=dict)
    current_T: Tensor | None = None

    @classmethod
    def of(cls, config: LoRAConfig) -> TokenRoles:
        names = tuple(config.roles)
        return cls(names, {one: place for place, name in enumerate(names) for one in config.roles[name]})

    def expect(self, microbatch: Microbatch, device: torch.device) -> None:
        """Set the roles of the tokens of the next forward."""
        if not self.names:
            return
        self.current_T = None
        if microbatch.segment_names:
            places = [self.roles.get(name, -1) for name in microbatch.segment_names]
            lengths = torch.tensor(microbatch.segment_lengths, device=device)
            self.current_T = torch.repeat_interleave(torch.tensor(places, device=device), lengths)


class RoleMask(nn.Module):
    """Passes the input of an adapter for the tokens of its role, and zeros for all others.

    A product of zeros adds nothing, and gives the adapter a gradient of zeros. It takes the place of the
    adapter's dropout.
    """

    def __init__(self, dropout: nn.Module, roles: TokenRoles, place: int) -> None:
        super().__init__()
        self.dropout = dropout
        self.roles = roles
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.dropout(x)
        roles_T = self.roles.current_T
        if roles_T is None:
            return dropped if self.place == -1 else dropped * 0.0
        assert x.shape[-2] == len(roles_T), "the tokens of a layer are not those of the microbatch"
        return dropped * (roles_T == self.place).to(x.dtype)[:, None]


def add_adapter(module: PreTrainedModel, config: LoRAConfig, *, dtype: torch.dtype) -> None:
    """Add adapters to the linear layers that `config` names, and freeze all other weights.

    The adapters are on the meta device until they are allocated (`Outline.fill`) and get their first values
    (`initialize_adapters`). The head of a reward model gets no adapter: it is new and is trained itself
    (`attach_score_head`). `dtype` is that of the adapter's weights.

    Raises:
        ConfigError: no linear layer of the model has such a name.
    """
    from peft import inject_adapter_in_model

    described = _peft_config(config)
    described.exclude_modules = [SCORE_HEAD] if hasattr(module, SCORE_HEAD) else None
    try:
        inject_adapter_in_model(described, module, _ADAPTER, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ConfigError(
            f"model.lora.target_modules={list(config.target_modules)} does not fit the model: {error}"
        ) from error
    strange = [name for name, layer in _layers(module) if not layer.lora_A]
    if strange:
        raise ConfigError(
            f"model.lora.target_modules names {strange[0]!r}, which is not a linear layer; only linear "
            "layers can have adapters"
        )
    if config.roles:
        _add_roles(module, described, TokenRoles.of(config))
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _add_roles(module: PreTrainedModel, described: LoraConfig, roles: TokenRoles) -> None:
    """Add the adapters of all roles to the layers that have the policy's; all are computed and trained."""
    from peft import inject_adapter_in_model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")
        for name in roles.names:
            inject_adapter_in_model(described, module, _in_peft(name), low_cpu_mem_usage=True)
    adapters = [_ADAPTER, *map(_in_peft, roles.names)]
    for _, layer in _layers(module):
        layer.set_adapter(adapters)
        for place, adapter in enumerate(adapters, start=-1):
            layer.lora_dropout[adapter] = RoleMask(layer.lora_dropout[adapter], roles, place)


def _in_peft(role: str) -> str:
    """Return the name of a role's adapter in peft's layers, where names of attributes are not allowed."""
    return f"role_{role}"


def find_token_roles(module: nn.Module) -> TokenRoles:
    """Return the roles of a module with adapters; without any if it has the policy's alone."""
    return next((mask.roles for mask in module.modules() if isinstance(mask, RoleMask)), TokenRoles())


@torch.no_grad()
def initialize_adapters(module: PreTrainedModel) -> None:
    """Give allocated adapters their first values: A from the current seed, B zero, so that they add nothing.

    The values are those of `peft` for a whole model, so they do not depend on the number of ranks. At most
    one adapter is whole at a time.
    """
    _initialize(module, None)
    for role in find_token_roles(module).names:
        _initialize(module, role)


def _initialize(module: PreTrainedModel, role: str | None) -> None:
    adapters = low_ranks(module, role)
    for name, layer in _layers(module):
        down, up = adapters[f"{name}.weight"].down, adapters[f"{name}.weight"].up
        base = layer.get_base_layer().weight
        assert isinstance(base, Tensor), name
        # peft draws thrice: both layers when they are built, and A once more. It rounds to the base's dtype.
        drawn = nn.Linear(down.shape[1], down.shape[0], bias=False)
        nn.Linear(up.shape[1], up.shape[0], bias=False)
        nn.init.kaiming_uniform_(drawn.weight, a=math.sqrt(5))
        put(down, drawn.weight.to(base.dtype))
        own_part(up)[0].zero_()


@torch.no_grad()
def read_adapters(module: PreTrainedModel, folder: Path) -> None:
    """Give allocated adapters the values of a stored one, `adapter_model.safetensors` in `folder`; each rank
    keeps its own part.

    Raises:
        ConfigError: the file is damaged, or its layers or their sizes are others than the model's.
    """
    tensors, file = adapter_tensors(low_ranks(module)), folder / WEIGHTS_FILE
    try:
        with safe_open(file, framework="pt") as stored:
            names = set(stored.keys())
            for name in sorted(tensors.keys() ^ names):
                what = "lacks" if name in tensors else "has the further tensor"
                raise ConfigError(
                    f"model.lora.path: {file} {what} {name!r}; use the model that the adapter was trained on"
                )
            for name, tensor in tensors.items():
                shape = tuple(stored.get_slice(name).get_shape())
                if shape != tuple(tensor.shape):
                    raise ConfigError(
                        f"model.lora.path: {file} has {name!r} of shape {list(shape)}, and this model needs "
                        f"{list(tensor.shape)}; use the model that the adapter was trained on"
                    )
                put(tensor, stored.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model.lora.path: {file} cannot be read: {error}") from error


def cut_parts(layer: Any, *, is_colwise: bool) -> tuple[list[nn.Module], nn.Module | None]:
    """Return the linear layers to shard if the matrix of `layer` is, and the factor of its adapter that stays
    whole.

    W and B have the same rows, W and A the same columns. None: there is no adapter.
    """
    if not hasattr(layer, "base_layer"):
        return [layer], None
    factors = {name: getattr(layer, name)[_ADAPTER] for name in ("lora_A", "lora_B")}
    cut = factors.pop("lora_B" if is_colwise else "lora_A")
    [whole] = factors.values()
    return [layer.base_layer, cut], whole


def published_name(name: str) -> str | None:
    """Return the name that a weight has without adapters; None for a part of an adapter."""
    return None if ".lora_" in name else name.replace(_BASE_LAYER, ".")


def low_ranks(module: nn.Module, role: str | None = None) -> Mapping[str, LowRank]:
    """Return the adapter of each weight that has one, by the weight's published name.

    role: whose; None: the policy's own.
    """
    found, adapter = {}, _ADAPTER if role is None else _in_peft(role)
    for name, layer in _layers(module):
        down, up = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
        assert isinstance(down, Tensor), name
        assert isinstance(up, Tensor), name
        found[f"{name}.weight"] = LowRank(
            down, up, float(layer.scaling[adapter]), bool(getattr(layer, "fan_in_fan_out", False))
        )
    return found


@contextmanager
def switched_off(module: nn.Module) -> Iterator[None]:
    """Compute without adapters inside the block, i.e. with the policy as before training."""
    layers = [layer for _, layer in _layers(module)]
    # Not with peft's enable_adapters: it also toggles requires_grad, which FSDP records at the first forward.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapter_tensors(adapters: Mapping[str, LowRank]) -> dict[str, Tensor]:
    """Return A and B of every adapter by their names in peft's files; sharded if the model is."""
    tensors = {}
    for name, adapter in adapters.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{layer}.lora_A.weight"] = adapter.down
        tensors[f"{layer}.lora_B.weight"] = adapter.up
    return tensors


def write_adapter(tensors: Mapping[str, Tensor], config: LoRAConfig, base: str, folder: Path) -> None:
    """Write gathered `adapter_tensors` in peft's format: adapter_config.json and
    adapter_model.safetensors.
    """
    described = _peft_config(config)
    described.base_model_name_or_path = base
    described.inference_mode = True
    named = set(config.target_modules)
    if not any("." in name for name in named):  # a name with dots may mean some layers of a kind only
        named = {name.rsplit(".", 3)[1] for name in tensors}
    described.target_modules = sorted(named)
    described.save_pretrained(str(folder))
    file = folder / WEIGHTS_FILE
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
        str(file),
        metadata={"format": "pt"},
    )
    file.chmod(0o644)  # safetensors creates private files, but a server may run under another account


def _peft_config(config: LoRAConfig) -> LoraConfig:
    from peft import LoraConfig

    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft divides it by the rank, so a float works
        lora_dropout=config.dropout,
        target_modules=list(config.target_modules) or _ALL_LINEAR,
        task_type="CAUSAL_LM",
    )


def _layers(module: nn.Module) -> list[tuple[str, LoraLayer]]:
    # Not imported yet, peft has built no layer; its import would slow down the start of every rank.
    if "peft" not in sys.modules:
        return []
    from peft.tuners.lora import LoraLayer

    return [(name, layer) for name, layer in module.named_modules() if isinstance(layer, LoraLayer)]
