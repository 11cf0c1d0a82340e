"""`import_gguf`: a GGUF file becomes a folder that transformers and SGLang load."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from agentrl.data.atomic_files import require_new_folder
from agentrl.errors import ConfigError
from agentrl.extras.datatools.gguf.architecture import PlannedTensor, plan_tensors, read_config
from agentrl.extras.datatools.gguf.file import GGUFFile
from agentrl.extras.datatools.gguf.tokenizer import ImportedTokenizer, read_tokenizer
from agentrl.learner.weights import MAX_FILE_BYTES, FolderWriter, plan_files, write_index
from agentrl.types import TensorSpec

_SAFETENSORS = {"float32": "F32", "bfloat16": "BF16"}
_ALIGNMENT = 8
"""Of the data in a safetensors file, in bytes."""


@dataclass(frozen=True, slots=True)
class ImportedModel:
    """What was imported: name and licence as the file states them, sizes, and how it was quantized."""

    name: str
    license: str
    model_type: str
    num_parameters: int
    num_bytes: int
    quantizations: tuple[str, ...]
    num_tokens: int
    num_merges: int
    splitting: str
    templates: tuple[str, ...]

    def lines(self) -> list[str]:
        templates = ", ".join(self.templates) or "none in the file; set model.chat_template"
        return [
            f"model: {self.name} ({self.model_type}), licence: {self.license}",
            f"weights: {self.num_parameters / 1e6:.1f} million parameters, {self.num_bytes / 2**20:.0f} MiB, "
            f"from {', '.join(self.quantizations)}",
            f"tokenizer: {self.num_tokens} tokens and {self.num_merges} merges as in the file, split as "
            f"{self.splitting}",
            f"chat template: {templates}",
        ]


def import_gguf(
    path: Path, out: Path, *, dtype: str = "float32", max_file_bytes: int = MAX_FILE_BYTES
) -> ImportedModel:
    """Write the model of a GGUF file to the folder `out`: config, weights, tokenizer, chat templates.

    The folder appears complete or not at all. Of the weights, a few million are in memory at a time.

    Args:
        dtype: float32 or bfloat16, of the dequantised weights.

    Raises:
        ConfigError: `out` is not empty, or the file is damaged or of a kind that cannot be imported.
        DiskError: `out` cannot be written.
    """
    if dtype not in _SAFETENSORS:
        raise ConfigError(f"unknown dtype {dtype!r}; known: {', '.join(_SAFETENSORS)}")
    require_new_folder(out)
    file = GGUFFile(path)
    tokenizer = read_tokenizer(file)
    config = read_config(file)
    if tokenizer.tokenizer.get_vocab_size() > config.vocab_size:
        raise ConfigError(
            f"{path} has {tokenizer.tokenizer.get_vocab_size()} tokens, but embeddings of {config.vocab_size}"
        )
    plan = plan_tensors(file, config)
    itemsize = getattr(torch, dtype).itemsize
    specs = {
        tensor.name: TensorSpec(
            tensor.name, dtype, tensor.shape, file.tensors[tensor.stored_name].n_elements * itemsize
        )
        for tensor in plan
    }
    files = plan_files(list(specs.values()), max_bytes=max_file_bytes)
    writer = FolderWriter(out)
    try:
        by_name = {tensor.name: tensor for tensor in plan}
        for name, names in files.items():
            writer.write(
                lambda folder, name=name, names=names: _write_safetensors(  # type: ignore[misc]
                    folder / name,
                    [specs[one] for one in names],
                    _values(file, [by_name[one] for one in names]),
                )
            )
        writer.write(lambda folder: write_index(files, list(specs.values()), folder))
        writer.write(lambda folder: _write_config(config, tokenizer, dtype, folder))
        writer.write(lambda folder: _write_tokenizer(tokenizer, config.max_position_embeddings, folder))
        writer.finish()
    finally:
        writer.discard()
    return _describe(file, config, tokenizer, list(specs.values()))


def _values(file: GGUFFile, tensors: Sequence[PlannedTensor]) -> Iterator[torch.Tensor]:
    for tensor in tensors:
        for block in file.read(tensor.stored_name, tensor.rows):
            yield torch.from_numpy(block)


def _write_safetensors(path: Path, specs: Sequence[TensorSpec], values: Iterator[torch.Tensor]) -> None:
    """Write a safetensors file from the values of its tensors in order, as they come.

    The library's own `save_file` needs all tensors of a file at once.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        start, end = end, end + spec.num_bytes
        header[spec.name] = {
            "dtype": _SAFETENSORS[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    dtype = getattr(torch, specs[0].dtype)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for block in values:
            file.write(block.to(dtype).contiguous().view(torch.uint8).numpy().data)
        assert file.tell() == 8 + len(text) + end


def _write_config(config: PreTrainedConfig, tokenizer: ImportedTokenizer, dtype: str, folder: Path) -> None:
    special = {f"{name}_token_id": id for name, id in tokenizer.special_ids.items() if name != "unk"}
    for name in ("bos", "eos"):
        # No padding token: transformers gives its embedding no gradient, and it is often the end of a turn.
        setattr(config, f"{name}_token_id", tokenizer.special_ids.get(name))
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config.dtype = getattr(torch, dtype)
    config.save_pretrained(folder)
    ends = tokenizer.end_ids
    _write_json(
        folder / "generation_config.json", {**special, "eos_token_id": ends[0] if len(ends) == 1 else ends}
    )


def _write_tokenizer(imported: ImportedTokenizer, max_tokens: int, folder: Path) -> None:
    imported.tokenizer.save(str(folder / "tokenizer.json"))
    named = {f"{name}_token": imported.tokenizer.id_to_token(id) for name, id in imported.special_ids.items()}
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_tokens,
            "clean_up_tokenization_spaces": False,
            **named,
        },
    )
    for name, template in imported.templates.items():
        path = folder / (
            "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
        )
        path.parent.mkdir(exist_ok=True)
        path.write_text(template, encoding="utf-8")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _describe(
    file: GGUFFile, config: PreTrainedConfig, tokenizer: ImportedTokenizer, specs: Sequence[TensorSpec]
) -> ImportedModel:
    return ImportedModel(
        name=file.optional("general.name", str) or file.path.stem,
        license=file.optional("general.license", str) or "not stated in the file",
        model_type=config.model_type,
        num_parameters=sum(math.prod(spec.shape) for spec in specs),
        num_bytes=sum(spec.num_bytes for spec in specs),
        quantizations=tuple(sorted({tensor.tensor_type.name for tensor in file.tensors.values()})),
        num_tokens=tokenizer.tokenizer.get_vocab_size(),
        num_merges=tokenizer.num_merges,
        splitting=tokenizer.splitting,
        templates=tuple(tokenizer.templates),
    )
