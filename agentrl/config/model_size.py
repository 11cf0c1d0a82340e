"""Size of a model, from its config.json alone: parameters, and numbers per token that it keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

KNOWN_TYPES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Values of `model_type` whose layers have attention with q, k, v, o, and a gated MLP of three matrices or
several such MLPs as experts.
"""
_EXPERT_WIDTH: Mapping[str, str] = {
    "mixtral": "intermediate_size",
    "olmoe": "intermediate_size",
    "qwen2_moe": "moe_intermediate_size",
    "qwen3_moe": "moe_intermediate_size",
}
"""Types that have experts, with the key of the width of one."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of one layer.

    num: experts that a token may be sent to.
    per_token: experts that it is sent to.
    width: columns of one expert's MLP.
    shared_width: columns of the MLP that all tokens go through, with a gate of its own; 0: there is none.
    """

    num: int
    per_token: int
    width: int
    shared_width: int = 0


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a decoder of `KNOWN_TYPES`.

    intermediate_size: columns of the MLP of layers without experts.
    num_layers: all layers. num_expert_layers: those of them that have experts.
    vectors_per_layer: elements of norms and biases of a layer.
    query_norms: elements of a layer's queries and keys that are normalized.
    window: tokens that a layer with sliding attention sees; num_window_layers: how many layers have it.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool
    vectors_per_layer: int
    query_norms: int = 0
    experts: Experts | None = None
    num_expert_layers: int = 0
    window: int | None = None
    num_window_layers: int = 0

    @classmethod
    def read(cls, path: str) -> ModelSize | None:
        """Return the size of the model in a local folder; None if there is none or its type is not known."""
        try:
            return cls.of(json.loads((Path(path).expanduser() / "config.json").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return None  # the run itself reports a broken file at its start

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelSize | None:
        """Return the size of the model that a config.json describes; None if its type is not known."""
        try:
            return _parse(config)
        except (KeyError, TypeError, ValueError):
            return None  # the run itself reports a broken config at its start

    @property
    def attention_width(self) -> int:
        """Columns of all heads of a layer."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of all heads of a layer's keys."""
        return self.num_kv_heads * self.head_dim

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """The matrices of a layer without experts, by name: columns of its input and of its output."""
        hidden, heads, kv, mlp = self.hidden_size, self.attention_width, self.kv_width, self.intermediate_size
        return {
            "q_proj": (hidden, heads),
            "k_proj": (hidden, kv),
            "v_proj": (hidden, kv),
            "o_proj": (heads, hidden),
            "gate_proj": (hidden, mlp),
            "up_proj": (hidden, mlp),
            "down_proj": (mlp, hidden),
        }

    @property
    def num_active_parameters(self) -> int:
        """Parameters of the layers' matrices by which each token is multiplied: of the experts, those
        chosen.
        """
        return self._matrices(0 if self.experts is None else self.experts.per_token)

    @property
    def num_head_parameters(self) -> int:
        """Parameters of the output head; the embedding has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def num_matrix_parameters(self) -> int:
        """Parameters by which a sampled token is multiplied, with the output head; experts only if chosen."""
        return self.num_active_parameters + self.num_head_parameters

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of all layers, with all experts."""
        matrices = self._matrices(0 if self.experts is None else self.experts.num)
        return matrices + self.num_layers * self.vectors_per_layer

    @property
    def largest_layer_parameters(self) -> int:
        """Parameters of the largest layer, with all its experts."""
        mlps = [self._mlp] if self.num_expert_layers < self.num_layers else []
        if self.experts is not None and self.num_expert_layers:
            mlps.append(self._experts(self.experts.num))
        return self._attention + self.vectors_per_layer + max(mlps, default=0)

    @property
    def num_root_parameters(self) -> int:
        """Parameters outside of the layers: embedding, head and the last norm; a tied head counts once."""
        return self.hidden_size + (1 if self.is_tied else 2) * self.num_head_parameters

    @property
    def num_parameters(self) -> int:
        """All parameters; tied embeddings count once."""
        return self.num_layer_parameters + self.num_root_parameters

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the KV cache has per token."""
        return 2 * self.num_layers * self.kv_width

    @property
    def _attention(self) -> int:
        return 2 * self.hidden_size * (self.attention_width + self.kv_width)

    @property
    def _mlp(self) -> int:
        return 3 * self.hidden_size * self.intermediate_size

    def _experts(self, num: int) -> int:
        """Parameters of `num` experts of a layer, its router, and what all tokens share."""
        assert self.experts is not None, "a model without experts"
        own = self.experts
        shared = 3 * own.shared_width + 1 if own.shared_width else 0  # with a gate of one column
        return self.hidden_size * (3 * own.width * num + own.num + shared)

    def _matrices(self, num_experts: int) -> int:
        sparse = self.num_expert_layers * self._experts(num_experts) if self.experts else 0
        dense = (self.num_layers - self.num_expert_layers) * self._mlp
        return self.num_layers * self._attention + dense + sparse


def _parse(config: Mapping[str, Any]) -> ModelSize | None:
    kind = config["model_type"]
    if kind not in KNOWN_TYPES:
        return None
    hidden, heads, layers = (
        int(config[key]) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or (128 if kind == "qwen3" else hidden // heads))
    query_norms = (heads + kv_heads) * head_dim if kind in ("qwen3", "qwen3_moe", "olmoe") else 0
    experts, expert_layers = _experts_of(config, kind, layers)
    window, window_layers = _window_of(config, kind, layers)
    size = ModelSize(
        hidden_size=hidden,
        intermediate_size=int(config["intermediate_size"]),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=int(config["vocab_size"]),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        vectors_per_layer=2 * hidden
        + (query_norms if kind == "olmoe" else 2 * head_dim if query_norms else 0),
        query_norms=query_norms,
        experts=experts,
        num_expert_layers=expert_layers,
        window=window,
        num_window_layers=window_layers,
    )
    return replace(size, vectors_per_layer=size.vectors_per_layer + _biases(config, kind, size))


def _biases(config: Mapping[str, Any], kind: str, size: ModelSize) -> int:
    of_queries = size.attention_width + 2 * size.kv_width
    count = 0
    if kind == "qwen2" or (kind == "qwen2_moe" and config.get("qkv_bias", True)):
        count += of_queries
    elif config.get("attention_bias"):
        count += of_queries + size.hidden_size
    if config.get("mlp_bias"):
        count += 2 * size.intermediate_size + size.hidden_size
    return count


def _experts_of(config: Mapping[str, Any], kind: str, layers: int) -> tuple[Experts | None, int]:
    """Return the experts of a layer, and how many layers have them."""
    if kind not in _EXPERT_WIDTH:
        return None, 0
    width = int(config[_EXPERT_WIDTH[kind]])
    # Published files have the architecture's own key; some versions of transformers write the other one.
    num = int(config["num_local_experts"] if "num_local_experts" in config else config["num_experts"])
    shared = int(config.get("shared_expert_intermediate_size") or 0) if kind == "qwen2_moe" else 0
    experts = Experts(num, int(config["num_experts_per_tok"]), width, shared)
    step, dense = int(config.get("decoder_sparse_step") or 1), config.get("mlp_only_layers") or ()
    return experts, sum((index + 1) % step == 0 and index not in dense for index in range(layers))


def _window_of(config: Mapping[str, Any], kind: str, layers: int) -> tuple[int | None, int]:
    """Return the tokens that sliding attention sees, and how many layers have it."""
    window = config.get("sliding_window", 4096 if kind == "mistral" else None)
    if kind.startswith("qwen") and not config.get("use_sliding_window"):
        window = None
    if not window:
        return None, 0
    if config.get("layer_types"):
        return int(window), list(config["layer_types"]).count("sliding_attention")
    first = int(config.get("max_window_layers", 28))
    own: Mapping[str, int] = {
        "mistral": layers,
        "mixtral": layers,
        "qwen3_moe": layers,
        "qwen2": max(0, layers - first),
        "qwen3": max(0, layers - first),
        "qwen2_moe": (min(layers, first) + 1) // 2,
    }
    return int(window), own.get(kind, 0)
