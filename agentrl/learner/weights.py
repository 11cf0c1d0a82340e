"""How the policy leaves the learner: as a Hugging Face folder, as the folder of its adapter, or bucket by bucket through a process group.

Every function is a collective of all ranks (gathering a sharded tensor is), though rank 0 alone writes and sends.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup

from agentrl.config.model import ModelConfig
from agentrl.errors import InfrastructureError
from agentrl.learner.lora import adapter_tensors, gather, write_adapter
from agentrl.learner.model import Policy
from agentrl.learner.ranks import Place
from agentrl.plugins.sources import locate
from agentrl.sglang.process_group import broadcast, flatten, tensor_checksum
from agentrl.types import TensorSpec

_COPIED = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "*.model", "*.jinja")


MAX_FILE_BYTES = 5 * 2**30


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


def export(policy: Policy, place: Place | None, model: ModelConfig, folder: Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Write weights, config and tokenizer as transformers and SGLang load them; the folder appears complete or not at all.

    Weights of more than `max_file_bytes` go into several files and an index; rank 0 holds one file's worth of them at a time.
    `place` is None in a process without ranks.

    Raises:
        InfrastructureError: the folder could not be written, for instance because the disk is full.
    """
    files = plan_files(tensor_specs(policy), max_bytes=max_file_bytes)
    writer = FolderWriter(folder) if place is None or place.is_first else None
    for file, names in files.items():
        tensors: dict[str, Tensor] = {}
        for name in names:
            full = policy.full_tensor(name)
            if writer is not None:
                tensors[name] = full.cpu().contiguous()
        if writer is not None:
            writer.write(partial(_write_weights, tensors, file))
    if writer is not None:
        writer.write(partial(_write_index, files, tensor_specs(policy)))
        writer.write(partial(describe, policy, model))
        writer.finish()


def adapter_specs(policy: Policy) -> list[TensorSpec]:
    """Return name (as in peft's files), dtype and shape of every tensor of the adapter."""
    dtype = policy.published_dtype
    return [
        TensorSpec(name, str(dtype).removeprefix("torch."), tuple(tensor.shape), tensor.numel() * dtype.itemsize)
        for name, tensor in adapter_tensors(policy.adapters).items()
    ]


def adapter_checksums(policy: Policy) -> dict[str, str]:
    """Return {name: sha256} of the adapter's tensors as `export_adapter` writes them."""
    return {name: tensor_checksum(tensor) for name, tensor in _whole_adapter(policy).items()}


def export_adapter(policy: Policy, place: Place | None, model: ModelConfig, folder: Path) -> None:
    """Write the adapter alone as peft and SGLang load it; the folder appears complete or not at all.

    Raises:
        InfrastructureError: the folder could not be written.
    """
    tensors = _whole_adapter(policy)
    if place is None or place.is_first:
        writer = FolderWriter(folder)
        writer.write(partial(write_adapter, tensors, model.lora, model.path))
        writer.finish()


def _whole_adapter(policy: Policy) -> dict[str, Tensor]:
    # In the published dtype: the learner's own forward rounds the adapter to it too.
    return {name: gather(tensor).to(policy.published_dtype).cpu() for name, tensor in adapter_tensors(policy.adapters).items()}


def describe(policy: Policy, model: ModelConfig, folder: Path) -> None:
    """Write all of the Hugging Face folder but the weights: configs, tokenizer, chat template, and code that came with the model."""
    _write_configs(policy, folder)
    copy_tokenizer(model, folder)


def plan_files(specs: Sequence[TensorSpec], *, max_bytes: int) -> dict[str, list[str]]:
    """Return {file name: names of its tensors} in order, each of at most `max_bytes` unless one tensor alone is larger."""
    groups: list[list[str]] = []
    room = 0
    for spec in specs:
        if not groups or spec.num_bytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(spec.name)
        room -= spec.num_bytes
    if len(groups) <= 1:
        return {"model.safetensors": groups[0] if groups else []}
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups)}


def send_bucket(policy: Policy, place: Place, names: Sequence[str], group: ProcessGroup | None) -> None:
    """Broadcast the named weights from rank 0 to the weights group as one flat run of bytes; `group` is None on other ranks."""
    tensors = [policy.full_tensor(name) for name in names]
    if place.is_first:
        assert group is not None, "send_bucket before join_weights_group"
        broadcast(flatten(tensors), group)


class FolderWriter:
    """Writes a folder beside its place and puts it there when it is whole.

    The first failure is kept and raised at the end: the other ranks are in the collectives that follow, and would wait for this one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._partial = folder.with_name(f".{folder.name}.partial")
        self._error: OSError | None = None
        shutil.rmtree(self._partial, ignore_errors=True)
        self.write(lambda folder: folder.mkdir(parents=True))

    def write(self, write: Callable[[Path], None]) -> None:
        if self._error is None:
            try:
                write(self._partial)
            except (OSError, SafetensorError) as error:
                self._error = OSError(str(error))

    def finish(self) -> None:
        self.write(self._replace)
        if self._error is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
            raise InfrastructureError(f"the policy could not be written to {self._folder}: {self._error}") from self._error

    def _replace(self, written: Path) -> None:
        _sync(written)
        if self._folder.exists():
            shutil.rmtree(self._folder)
        written.rename(self._folder)


def _write_weights(tensors: dict[str, Tensor], file: str, folder: Path) -> None:
    save_file(tensors, str(folder / file), metadata={"format": "pt"})
    (folder / file).chmod(0o644)  # safetensors makes it private; a server may run under another account


def _write_index(files: Mapping[str, Sequence[str]], specs: Sequence[TensorSpec], folder: Path) -> None:
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(spec.num_bytes for spec in specs)},
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_configs(policy: Policy, folder: Path) -> None:
    config = policy.module.config
    config.architectures = [policy.class_name]  # FSDP renames the class of what it shards
    config.dtype = policy.published_dtype
    config.save_pretrained(folder)
    generation = getattr(policy.module, "generation_config", None)  # a reward model generates nothing
    if generation is not None:
        generation.save_pretrained(folder)


def copy_tokenizer(model: ModelConfig, folder: Path) -> None:
    """Copy the tokenizer's files, the chat template in use, and code that came with the model."""
    source = Path(model.tokenizer_path or model.path)
    patterns = (*_COPIED, "*.py") if model.trust_remote_code else _COPIED
    files = {file for pattern in patterns for file in source.glob(pattern) if file.is_file()} if source.is_dir() else set()
    for file in files:
        shutil.copyfile(file, folder / file.name)
    if model.chat_template is not None:
        shutil.copyfile(locate(model.chat_template), folder / "chat_template.jinja")


def _sync(folder: Path) -> None:
    # A rename may reach the disk before the bytes do: after a power cut the folder would be there, and empty.
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
