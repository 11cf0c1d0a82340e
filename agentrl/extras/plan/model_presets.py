"""Sizes of published models by name, for simulations and plans of models that are not on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.config.model_size import ModelSize


def _dense(
    kind: str, hidden: int, mlp: int, layers: int, heads: int, kv: int, vocab: int, *, tied: bool = False
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


def _experts(
    hidden: int, layers: int, heads: int, kv: int, vocab: int, *, num: int, per_token: int, width: int
) -> dict[str, Any]:
    return {
        **_dense("qwen3_moe", hidden, width, layers, heads, kv, vocab),
        "head_dim": 128,
        "num_experts": num,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": width,
    }


def _glm(hidden: int, mlp: int, layers: int, dense: int, *, num: int, width: int) -> dict[str, Any]:
    """Return the sizes of GLM-4.5: its layers are those of a Qwen2-MoE with larger heads, but for gates."""
    own = _experts(hidden, layers, 96, 8, 151552, num=num, per_token=8, width=width)
    return own | {
        "model_type": "qwen2_moe",
        "intermediate_size": mlp,
        "shared_expert_intermediate_size": width,
        "mlp_only_layers": list(range(dense)),
    }


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "qwen2.5-0.5b": _dense("qwen2", 896, 4864, 24, 14, 2, 151936, tied=True),
    "qwen2.5-1.5b": _dense("qwen2", 1536, 8960, 28, 12, 2, 151936, tied=True),
    "qwen2.5-7b": _dense("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "qwen2.5-14b": _dense("qwen2", 5120, 13824, 48, 40, 8, 152064),
    "qwen2.5-32b": _dense("qwen2", 5120, 27648, 64, 40, 8, 152064),
    "qwen2.5-72b": _dense("qwen2", 8192, 29568, 80, 64, 8, 152064),
    "qwen3-1.7b": _dense("qwen3", 2048, 6144, 28, 16, 8, 151936, tied=True),
    "qwen3-4b": _dense("qwen3", 2560, 9728, 36, 32, 8, 151936, tied=True),
    "qwen3-8b": _dense("qwen3", 4096, 12288, 36, 32, 8, 151936),
    "qwen3-14b": _dense("qwen3", 5120, 17408, 40, 40, 8, 151936),
    "qwen3-32b": _dense("qwen3", 5120, 25600, 64, 64, 8, 151936),
    "llama-3.1-8b": _dense("llama", 4096, 14336, 32, 32, 8, 128256),
    "llama-3.1-70b": _dense("llama", 8192, 28672, 80, 64, 8, 128256),
    "qwen3-30b-a3b": _experts(2048, 48, 32, 4, 151936, num=128, per_token=8, width=768),
    "qwen3-235b-a22b": _experts(4096, 94, 64, 4, 151936, num=128, per_token=8, width=1536),
    "glm-4.5-air": _glm(4096, 10944, 46, 1, num=128, width=1408),
}
"""By name in lower case. Source: the config.json of each model on the Hugging Face hub."""


def preset(name: str) -> ModelSize | None:
    """Return the size of the model of this name; None if it is not known."""
    config = PRESETS.get(name.rpartition("/")[2].lower())
    return None if config is None else ModelSize.of(config)


def known_size(path: str) -> ModelSize | None:
    """Return the size of the model in a local folder, or else of the one that the path names.

    None if the folder has another architecture, or if there is no folder and the name is not known.
    """
    is_local = bool(path) and Path(path).expanduser().is_dir()
    return ModelSize.read(path) if is_local else preset(path)
