"""From the metadata of a GGUF file to the config of transformers, and from its tensors to the model's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, get_tensor_name_map
from huggingface_hub.errors import StrictDataclassError
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from agentrl.errors import ConfigError
from agentrl.extras.datatools.gguf.file import GGUFFile

EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class Architecture:
    """A kind of model that can be imported.

    Attributes:
        is_permuted: llama.cpp stores the rows of Q and K in the order in which it rotates them.
        has_bias_option: the config has `attention_bias`.
    """

    tensor_names: MODEL_ARCH
    config: Callable[..., PreTrainedConfig]
    is_permuted: bool
    has_bias_option: bool


ARCHITECTURES = {
    "llama": Architecture(MODEL_ARCH.LLAMA, LlamaConfig, is_permuted=True, has_bias_option=True),
    "qwen2": Architecture(MODEL_ARCH.QWEN2, Qwen2Config, is_permuted=False, has_bias_option=False),
    "qwen3": Architecture(MODEL_ARCH.QWEN3, Qwen3Config, is_permuted=False, has_bias_option=True),
}

_KNOWN_KEYS = frozenset(
    {
        *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
        *("attention.value_length", "attention.layer_norm_rms_epsilon"),
        *("rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor"),
        *("rope.scaling.original_context_length", "rope.scaling.finetuned"),
    }
)
"""Keys of an architecture that are read, or that change nothing. Any other key could change what the model
computes.
"""

LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The scaling of Llama 3.1 and 3.2. A GGUF file stores only the resulting factor of each frequency."""


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of the model: its name in transformers and in the file, and its shape.

    `rows`: the row of the file for each row of the tensor; None: the same.
    """

    name: str
    stored_name: str
    shape: tuple[int, ...]
    rows: NDArray[np.int64] | None


def read_config(file: GGUFFile) -> PreTrainedConfig:
    """Return the model's config, without its special tokens.

    Raises:
        ConfigError: the architecture is unknown, a key is missing, or a key has no equivalent.
    """
    name, architecture = _architecture(file)
    _refuse_unknown_keys(file, name)
    num_heads = file.required(f"{name}.attention.head_count", int)
    hidden_size = file.required(f"{name}.embedding_length", int)
    head_dim = file.optional(f"{name}.attention.key_length", int) or hidden_size // max(num_heads, 1)
    for key in ("attention.value_length", "rope.dimension_count"):
        size = file.optional(f"{name}.{key}", int)
        if size not in (None, head_dim):
            raise ConfigError(f"{file.path}: {name}.{key} must be the size of a head, {head_dim}: {size}")
    options: dict[str, Any] = {}
    if architecture.has_bias_option:
        options["attention_bias"] = "blk.0.attn_output.bias" in file.tensors
    if architecture.config is LlamaConfig:
        options["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    try:
        config = architecture.config(
            vocab_size=file.shape(EMBEDDING)[0],
            hidden_size=hidden_size,
            intermediate_size=file.required(f"{name}.feed_forward_length", int),
            num_hidden_layers=file.required(f"{name}.block_count", int),
            num_attention_heads=num_heads,
            num_key_value_heads=file.optional(f"{name}.attention.head_count_kv", int) or num_heads,
            head_dim=head_dim,
            max_position_embeddings=file.required(f"{name}.context_length", int),
            rms_norm_eps=file.required(f"{name}.attention.layer_norm_rms_epsilon", float),
            rope_parameters=_rope(file, name),
            tie_word_embeddings=HEAD not in file.tensors,
            **options,
        )
    except (
        StrictDataclassError,
        ValueError,
        TypeError,
    ) as error:  # transformers checks the values and how they fit together
        raise ConfigError(f"{file.path}: {' '.join(str(error).split())}") from error
    if ROPE_FACTORS in file.tensors:
        config.rope_parameters = _llama3_rope(file, config)
    return config


def plan_tensors(file: GGUFFile, config: PreTrainedConfig) -> list[PlannedTensor]:
    """Return the model's tensors, in its own order.

    Raises:
        ConfigError: the file does not have exactly these tensors, or one has another shape.
    """
    _, architecture = _architecture(file)
    names = get_tensor_name_map(architecture.tensor_names, config.num_hidden_layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    plan = []
    for name, parameter in model.named_parameters():
        stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored_name is not None, name
        shape = tuple(parameter.shape)
        if file.shape(stored_name) != shape:
            raise ConfigError(
                f"{file.path}: tensor {stored_name} has the shape {list(file.shape(stored_name))}; the "
                f"metadata asks for {list(shape)}"
            )
        rows = _rows(name, shape[0], config) if architecture.is_permuted else None
        plan.append(PlannedTensor(name, stored_name, shape, rows))
    unknown = sorted(file.tensors.keys() - {tensor.stored_name for tensor in plan} - {ROPE_FACTORS})
    if unknown:
        raise ConfigError(
            f"{file.path} has tensors that {config.model_type} does not have: {', '.join(unknown[:4])}"
        )
    return plan


def _architecture(file: GGUFFile) -> tuple[str, Architecture]:
    name = file.required("general.architecture", str)
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{file.path}: architecture {name!r} cannot be imported; known: {known}")
    return name, ARCHITECTURES[name]


def _refuse_unknown_keys(file: GGUFFile, name: str) -> None:
    for key, value in file.metadata.items():
        if key.startswith(f"{name}.") and key.removeprefix(f"{name}.") not in _KNOWN_KEYS and value:
            raise ConfigError(
                f"{file.path}: {key}={value!r} has no equivalent in the models that can be imported"
            )


def _rope(file: GGUFFile, name: str) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default"}
    # llama.cpp's own default
    rope["rope_theta"] = file.optional(f"{name}.rope.freq_base", float) or 10000.0
    scaling = file.optional(f"{name}.rope.scaling.type", str) or "none"
    if scaling == "none":
        return rope
    if scaling not in ("linear", "yarn"):
        raise ConfigError(f"{file.path}: {name}.rope.scaling.type must be none, linear or yarn: {scaling!r}")
    rope |= {"rope_type": scaling, "factor": file.required(f"{name}.rope.scaling.factor", float)}
    if scaling == "yarn":
        key = f"{name}.rope.scaling.original_context_length"
        rope["original_max_position_embeddings"] = file.required(key, int)
    return rope


def _llama3_rope(file: GGUFFile, config: PreTrainedConfig) -> dict[str, Any]:
    """Return the rope settings whose frequencies are divided by the factors in the file."""
    factors = np.concatenate(list(file.read(ROPE_FACTORS)))
    plain = 1.0 / config.rope_parameters["rope_theta"] ** (
        np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    )
    config.rope_parameters = {
        **config.rope_parameters,
        **LLAMA3_SCALING,
        "rope_type": "llama3",
        "factor": float(factors.max()),
    }
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    if factors.shape != plain.shape or not np.allclose(plain / factors, scaled.numpy(), rtol=1e-4):
        raise ConfigError(
            f"{file.path}: factors in {ROPE_FACTORS} are not those of Llama 3.1 and 3.2, the only ones known"
        )
    return dict(config.rope_parameters)


def _rows(name: str, num_rows: int, config: PreTrainedConfig) -> NDArray[np.int64] | None:
    """Return the file's row for each row of Q and K, for weights and biases; None for other tensors.

    llama.cpp rotates the neighbours (0, 1), (2, 3), ... of a head of d rows, transformers (0, d/2),
    (1, d/2 + 1), ...
    """
    layer = name.split(".")[-2]
    num_heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(layer)
    if num_heads is None:
        return None
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
