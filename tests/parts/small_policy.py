"""A forward of Qwen 2 in numpy, for policies of a few thousand weights: it imports in a blink."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
READ = {"F32": np.dtype("<f4"), "BF16": np.dtype("<u2"), "F16": np.dtype("<f2")}


def read_weights(folder: Path) -> dict[str, Floats]:
    """Return the tensors of all safetensors files of a folder, as float32."""
    found: dict[str, Floats] = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                values = np.frombuffer(data[start + first : start + last], READ[entry["dtype"]])
                found[name] = as_float32(values).reshape(entry["shape"])
    if not found:
        raise FileNotFoundError(f"{folder} has no weights")
    return found


def as_float32(values: NDArray[Any]) -> Floats:
    """Return values as float32; bfloat16 comes as its two bytes, u16."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


@dataclass
class Cache:
    """Keys and values of the tokens that were read, f32[N, heads, size] per layer."""

    keys: list[Floats] = field(default_factory=list)
    values: list[Floats] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.keys[0]) if self.keys else 0

    def extend(self, layer: int, keys: Floats, values: Floats) -> tuple[Floats, Floats]:
        """Append keys and values of new tokens to a layer; return all of the layer."""
        if layer == len(self.keys):
            self.keys.append(keys)
            self.values.append(values)
        else:
            self.keys[layer] = np.concatenate([self.keys[layer], keys])
            self.values[layer] = np.concatenate([self.values[layer], values])
        return self.keys[layer], self.values[layer]


class SmallPolicy:
    """A Qwen 2 of a folder. `weights` may be replaced at any time between two forwards."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.num_layers: int = config["num_hidden_layers"]
        self.num_heads: int = config["num_attention_heads"]
        self.num_kv_heads: int = config["num_key_value_heads"]
        self.head_size: int = config.get("head_dim") or config["hidden_size"] // self.num_heads
        self.vocab_size: int = config["vocab_size"]
        self.context_tokens: int = config["max_position_embeddings"]
        self._epsilon: float = config["rms_norm_eps"]
        rope = config.get("rope_parameters") or config
        self._base: float = rope["rope_theta"]
        self.weights: Mapping[str, Floats] = read_weights(folder)

    def logits(self, ids: Sequence[int], cache: Cache) -> Floats:
        """Return the logits after each of the new tokens `ids`, f32[N, V]; the cache holds those before."""
        first = cache.num_tokens
        hidden = self.weights["model.embed_tokens.weight"][np.asarray(ids)]
        turns = self._turns(first, len(ids))
        for layer in range(self.num_layers):
            at = f"model.layers.{layer}."
            hidden = hidden + self._attend(
                at, layer, self._norm(at + "input_layernorm", hidden), turns, cache
            )
            hidden = hidden + self._mlp(at + "mlp.", self._norm(at + "post_attention_layernorm", hidden))
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return self._norm("model.norm", hidden) @ head.T

    def _attend(
        self, at: str, layer: int, hidden: Floats, turns: tuple[Floats, Floats], cache: Cache
    ) -> Floats:
        num, repeats = len(hidden), self.num_heads // self.num_kv_heads
        at += "self_attn."
        queries = _turned(self._linear(at + "q_proj", hidden).reshape(num, self.num_heads, -1), turns)
        keys = _turned(self._linear(at + "k_proj", hidden).reshape(num, self.num_kv_heads, -1), turns)
        values = self._linear(at + "v_proj", hidden).reshape(num, self.num_kv_heads, -1)
        keys, values = cache.extend(layer, keys, values)
        keys, values = np.repeat(keys, repeats, axis=1), np.repeat(values, repeats, axis=1)
        scores = np.einsum("qhd,khd->hqk", queries, keys) / np.float32(np.sqrt(self.head_size))
        is_later = np.arange(len(keys))[None, :] > np.arange(len(keys) - num, len(keys))[:, None]
        scores = np.where(is_later, np.float32(-np.inf), scores)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", shares, values).reshape(num, -1)
        return self._linear(at + "o_proj", mixed)

    def _mlp(self, at: str, hidden: Floats) -> Floats:
        gate = self._linear(at + "gate_proj", hidden)
        return self._linear(
            at + "down_proj", gate / (1 + np.exp(-gate)) * self._linear(at + "up_proj", hidden)
        )

    def _linear(self, name: str, hidden: Floats) -> Floats:
        product = hidden @ self.weights[name + ".weight"].T
        bias = self.weights.get(name + ".bias")
        return product if bias is None else product + bias

    def _norm(self, name: str, hidden: Floats) -> Floats:
        size = np.sqrt((hidden**2).mean(-1, keepdims=True) + np.float32(self._epsilon))
        return hidden / size * self.weights[name + ".weight"]

    def _turns(self, first: int, num: int) -> tuple[Floats, Floats]:
        """Return cosine and sine of the rotary embedding at positions from `first` on, f32[N, 1, size]."""
        steps = self._base ** -(np.arange(0, self.head_size, 2, dtype=np.float32) / self.head_size)
        angles = np.arange(first, first + num, dtype=np.float32)[:, None] * steps.astype(np.float32)
        angles = np.concatenate([angles, angles], -1)[:, None]
        return np.cos(angles), np.sin(angles)


def _turned(heads: Floats, turns: tuple[Floats, Floats]) -> Floats:
    cosine, sine = turns
    left, right = np.split(heads, 2, -1)
    return heads * cosine + np.concatenate([-right, left], -1) * sine


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
