"""Tiny GGUF files, written with llama.cpp's own writer as its converter writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from agentrl.extras.datatools.gguf.architecture import ARCHITECTURES

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
USER_DEFINED = ("<tool_call>", "</tool_call>")
TEXT = (
    Path(__file__).read_text(encoding="utf-8")
    + "12 123 1234 56789 x1y22 don't we'll I'VE \r\n\r\n 你好 \tß  é   \n"
)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def trained_bpe() -> tuple[list[str], list[str]]:
    """Return tokens and merges that cross words, digits and line breaks: another splitting makes other
    tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [" ".join(pair) for pair in model["merges"]]


TOKENS, MERGES = trained_bpe()


def tokenizer_keys(pre: str, *, size: int, specials_first: bool = False) -> dict[str, Any]:
    """Return the metadata of a tokenizer with `size` tokens; those that are not used come last."""
    added = [*((t, TokenType.CONTROL) for t in CONTROL), *((t, TokenType.USER_DEFINED) for t in USER_DEFINED)]
    own = [(token, TokenType.NORMAL) for token in TOKENS]
    entries = [*added, *own] if specials_first else [*own, *added]
    entries += [(f"[PAD{id}]", TokenType.UNUSED) for id in range(len(entries), size)]
    tokens = [token for token, _ in entries]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for _, kind in entries],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.chat_template": TEMPLATE,
    }


def tiny_model(architecture: str, *, vocab_size: int = 512, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIGS[architecture](**{**SIZES, "vocab_size": vocab_size, **options})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)  # they begin as ones and zeros
    return model


def rounded(model: PreTrainedModel, kind: GGMLQuantizationType) -> PreTrainedModel:
    """Return the model with the weights that remain after quantization."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.from_numpy(dequantize(quantize(parameter.numpy(), kind), kind).copy()))
    return model


def model_keys(architecture: str, model: PreTrainedModel) -> dict[str, Any]:
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        f"{architecture}.{key}": value
        for key, value in {
            "block_count": config.num_hidden_layers,
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "feed_forward_length": config.intermediate_size,
            "attention.head_count": config.num_attention_heads,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "rope.freq_base": float(config.rope_parameters["rope_theta"]),
            "vocab_size": config.vocab_size,
        }.items()
    }


def stored_tensors(architecture: str, model: PreTrainedModel) -> dict[str, np.ndarray]:
    """Return {name in the file: values}, with Q and K of llama in llama.cpp's order."""
    names = get_tensor_name_map(ARCHITECTURES[architecture].tensor_names, model.config.num_hidden_layers)
    stored = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
        count = heads.get(name.split(".")[-2])
        if architecture == "llama" and count is not None:
            halves = values.reshape(count, 2, len(values) // count // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        stored[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    return stored


def write_gguf(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> Path:
    """Write a file; keys whose value is None are left out."""
    writer = GGUFWriter(path, architecture)
    for key, value in keys.items():
        if value is not None:
            _add(writer, key, value)
    for name, values in tensors.items():
        if values.ndim > 1:
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: str | bool | int | float | Sequence[Any]) -> None:
    add = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }[type(value)]
    add(key, value)


def write_model(
    path: Path,
    architecture: str,
    model: PreTrainedModel,
    *,
    pre: str = "qwen2",
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> Path:
    """Write a model with a tokenizer; `keys` and `tensors` replace, or remove where they are None."""
    all_keys = {
        **model_keys(architecture, model),
        **tokenizer_keys(pre, size=model.config.vocab_size),
        **(keys or {}),
    }
    all_tensors = {**stored_tensors(architecture, model), **(tensors or {})}
    kept = {name: values for name, values in all_tensors.items() if values is not None}
    return write_gguf(path, all_keys.pop("general.architecture", architecture), all_keys, kept, kind=kind)
