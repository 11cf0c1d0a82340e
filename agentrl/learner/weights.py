"""How the policy leaves the learner: as a Hugging Face folder, or bucket by bucket through a process group.

Every function is a collective of all ranks (gathering a sharded tensor is), though rank 0 alone writes and sends.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup

from agentrl.config.schema import ModelConfig
from agentrl.errors import InfrastructureError
from agentrl.learner.model import Policy
from agentrl.learner.ranks import Place
from agentrl.sglang.process_group import broadcast, flatten, tensor_checksum
from agentrl.types import TensorSpec

_COPIED = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "*.model", "*.jinja")


def tensor_specs(policy: Policy) -> list[TensorSpec]:
    """Return name, dtype and shape of every published weight, in sending order."""
    dtype = policy.published_dtype
    return [
        TensorSpec(name, str(dtype).removeprefix("torch."), tuple(tensor.shape), tensor.numel() * dtype.itemsize)
        for name, tensor in policy.tensors.items()
    ]


def checksums(policy: Policy) -> dict[str, str]:
    """Return {name: sha256 of the weight as published}."""
    return {name: tensor_checksum(policy.full_tensor(name)) for name in policy.tensors}


def export(policy: Policy, place: Place, model: ModelConfig, folder: Path) -> None:
    """Write weights, config and tokenizer as transformers and SGLang load them; the folder appears complete or not at all.

    Raises:
        InfrastructureError: the folder could not be written, for instance because the disk is full.
    """
    tensors: dict[str, Tensor] = {}
    for name in policy.tensors:
        full = policy.full_tensor(name)
        if place.is_first:
            tensors[name] = full.cpu().contiguous()
    if place.is_first:
        _write_folder(policy, model, tensors, folder)


def send_bucket(policy: Policy, place: Place, names: Sequence[str], group: ProcessGroup | None) -> None:
    """Broadcast the named weights from rank 0 to the weights group as one flat run of bytes; `group` is None on other ranks."""
    tensors = [policy.full_tensor(name) for name in names]
    if place.is_first:
        assert group is not None, "send_bucket before join_weights_group"
        broadcast(flatten(tensors), group)


def _write_folder(policy: Policy, model: ModelConfig, tensors: dict[str, Tensor], folder: Path) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(tensors, str(partial / "model.safetensors"), metadata={"format": "pt"})
        (partial / "model.safetensors").chmod(0o644)  # safetensors makes it private; a server may run under another account
        _write_configs(policy, partial)
        _copy_tokenizer(model, partial)
        _sync(partial)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise InfrastructureError(f"the policy could not be written to {folder}: {error}") from error


def _write_configs(policy: Policy, folder: Path) -> None:
    config = policy.module.config
    config.architectures = [policy.class_name]  # FSDP renames the class of what it shards
    config.dtype = policy.published_dtype
    config.save_pretrained(folder)
    generation = getattr(policy.module, "generation_config", None)  # a reward model generates nothing
    if generation is not None:
        generation.save_pretrained(folder)


def _copy_tokenizer(model: ModelConfig, folder: Path) -> None:
    source = Path(model.tokenizer_path or model.path)
    files = {file for pattern in _COPIED for file in source.glob(pattern) if file.is_file()} if source.is_dir() else set()
    for file in files:
        shutil.copyfile(file, folder / file.name)
    if model.chat_template is not None:
        shutil.copyfile(model.chat_template, folder / "chat_template.jinja")


def _sync(folder: Path) -> None:
    # A rename may reach the disk before the bytes do: after a power cut the folder would be there, and empty.
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
