"""The routers of a mixture of experts: which experts compute a token, and how much each of them counts.

The learner and the embedded server read them in the same way. Shapes: Q tokens, E experts, K experts per
token, L layers of the model, whether or not they have experts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

if TYPE_CHECKING:  # takes seconds to import
    from transformers import PreTrainedModel

_ROUTERS: Mapping[str, bool | None] = {
    "Qwen3MoeTopKRouter": None,
    "Qwen2MoeTopKRouter": None,
    "OlmoeTopKRouter": None,
    "MixtralTopKRouter": True,
}
"""transformers' classes that take the softmax of their logits and keep its K largest values; whether these
are divided by their sum. None: as the config says.
"""
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRouter:
    """The router of one layer. `module` returns (logits f[Q, E], weights f[Q, K], experts i64[Q, K])."""

    layer: int
    module: nn.Module
    num_experts: int
    top_k: int
    is_normalized: bool

    def weights(self, probabilities_QE: Tensor, experts_QK: Tensor) -> Tensor:
        """Return f[Q, K], by how much the experts given count, whoever chose them."""
        chosen = probabilities_QE.gather(1, experts_QK)
        return chosen / chosen.sum(dim=-1, keepdim=True) if self.is_normalized else chosen


def find_routers(module: PreTrainedModel) -> tuple[ExpertRouter, ...]:
    """Return the routers in the order of the layers; empty for a dense model, and for routers of other kinds
    than those of Qwen3-MoE, Qwen2-MoE, OLMoE and Mixtral.
    """
    found = []
    for name, child in module.named_modules():
        kind = type(child).__name__
        layer = _LAYER.search(f".{name}.")
        if kind in _ROUTERS and layer is not None:
            rule = _ROUTERS[kind]
            is_normalized = bool(child.norm_topk_prob) if rule is None else rule
            found.append(
                ExpertRouter(int(layer[1]), child, int(child.num_experts), int(child.top_k), is_normalized)  # type: ignore[arg-type]
            )
    return tuple(found)


def num_layers(module: PreTrainedModel) -> int:
    """Return L."""
    return int(module.config.get_text_config().num_hidden_layers)


def as_table(experts: NDArray[np.int16], *, num_layers: int, top_k: int) -> NDArray[np.int16]:
    """Return recorded experts, i16[Q * L * K] or i16[Q, L * K], as i16[Q, L, K].

    Raises:
        ValueError: they are of a model of other sizes.
    """
    if experts.size % (num_layers * top_k):
        raise ValueError(
            f"{experts.size} recorded experts are no whole number of tokens with {num_layers} layers and "
            f"{top_k} experts each"
        )
    return experts.reshape(-1, num_layers, top_k)
