"""Size of a model, from its config.json alone: parameters, KV cache and activations per token."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

KNOWN_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` whose layers have attention with q, k, v, o and a gated MLP of three matrices."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a decoder of `KNOWN_TYPES`. Biases are not counted: less than a thousandth."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool

    @classmethod
    def read(cls, path: str) -> ModelSize | None:
        """Return the size of the model in a local folder; None if there is none or its type is not known."""
        try:
            read = json.loads((Path(path).expanduser() / "config.json").read_text(encoding="utf-8"))
            if read["model_type"] not in KNOWN_TYPES:
                return None
            num_heads, hidden_size = int(read["num_attention_heads"]), int(read["hidden_size"])
            return cls(
                hidden_size=hidden_size,
                intermediate_size=int(read["intermediate_size"]),
                num_layers=int(read["num_hidden_layers"]),
                num_heads=num_heads,
                num_kv_heads=int(read.get("num_key_value_heads") or num_heads),
                head_dim=int(read.get("head_dim") or hidden_size // num_heads),
                vocab_size=int(read["vocab_size"]),
                is_tied=bool(read.get("tie_word_embeddings", False)),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None  # the run itself reports a broken file at its start

    @property
    def num_matrix_parameters(self) -> int:
        """Parameters by which each token is multiplied: all matrices, including the output head."""
        attention = self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        layer = self.hidden_size * (attention + 3 * self.intermediate_size)
        return self.num_layers * layer + self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All parameters; tied embeddings count once."""
        norms = (2 * self.num_layers + 1) * self.hidden_size
        embeddings = 0 if self.is_tied else self.vocab_size * self.hidden_size
        return self.num_matrix_parameters + norms + embeddings

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the KV cache has per token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def activations_per_token(self) -> int:
        """Numbers kept per token for the backward pass, about: within a tenth of what autograd keeps."""
        return self.num_layers * (8 * self.hidden_size + 4 * self.intermediate_size)
