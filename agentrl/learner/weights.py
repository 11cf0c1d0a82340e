"""Weights that leave the ranks: exported to a folder, pickled for servers, and their checksums.

Every function is a collective of all ranks, because gathering a sharded tensor is one; only rank 0 writes
and sends.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import pickle
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import pad

from agentrl.chat.packaged import find_template
from agentrl.config.model import ModelConfig
from agentrl.data.atomic_files import sync
from agentrl.errors import DiskError
from agentrl.learner.joint_files import FileLayout, PartsWriter, lay_out
from agentrl.learner.lora import LowRank, adapter_tensors, write_adapter
from agentrl.learner.model import Policy
from agentrl.learner.ranks import RankPlace, largest_over_ranks
from agentrl.learner.sharding import gather
from agentrl.servers.process_group import tensor_bytes, tensor_checksum
from agentrl.servers.protocol import POLICY_ADAPTER, adapter_tensor
from agentrl.types import TensorSpec

_COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.model",
    "*.jinja",
    "*processor_config.json",  # settings for images
)

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers that SGLang computes as one, with their parts in the order of their rows."""

_ROUNDED = {
    "embed_tokens": (0, 64),
    "lm_head": (0, 64),
    "gate_proj": (0, 32),
    "up_proj": (0, 32),
    "down_proj": (1, 32),
}
"""Dimension of a layer's weight that SGLang pads, and to which multiple.

The vocabulary is padded everywhere, the width of an MLP on CPUs.
"""

MAX_FILE_BYTES = 5 * 2**30


def tensor_specs(policy: Policy) -> list[TensorSpec]:
    """Return name, dtype, shape and bytes of every published weight, in sending order."""
    return _specs({name: piece.shape for name, piece in policy.pieces.items()}, policy.published_dtype)


def checksums(policy: Policy, *, dtype: str | None = None, is_fused: bool = False) -> dict[str, str]:
    """Return {name: sha256 of the weight}, cast to `dtype` or as published. A collective.

    With `is_fused` the weights are hashed as SGLang holds them on one GPU or CPU: weights that it
    concatenates have one name and one checksum.
    """
    as_dtype = policy.published_dtype if dtype is None else getattr(torch, dtype)
    wholes = _fused(policy.pieces) if is_fused else {name: [name] for name in policy.pieces}
    whole_of = {part: name for name, parts in wholes.items() for part in parts}
    sums: dict[str, Any] = {name: hashlib.sha256() for name in wholes}
    for part, published in policy.full_tensors(list(whole_of)):
        tensor = published.to(as_dtype)
        sums[whole_of[part]].update(tensor_bytes(_padded(part, tensor) if is_fused else tensor))
    return {name: digest.hexdigest() for name, digest in sums.items()}


def _padded(name: str, tensor: Tensor) -> Tensor:
    """Pad a weight with zeros to SGLang's size."""
    for layer, (dimension, multiple) in _ROUNDED.items():
        if layer in name.split(".") and dimension < tensor.dim():
            missing = -tensor.shape[dimension] % multiple
            return pad(tensor, [0, 0] * (tensor.dim() - 1 - dimension) + [0, missing])
    return tensor


def _fused(names: Iterable[str]) -> dict[str, list[str]]:
    """Return {SGLang's name: the weights it contains, in order}."""
    fused: dict[str, list[str]] = {}
    order = {part: (whole, index) for whole, parts in _FUSED.items() for index, part in enumerate(parts)}
    for name in names:
        part = next((word for word in name.split(".") if word in order), None)
        fused.setdefault(name if part is None else name.replace(part, order[part][0]), []).append(name)
    for parts in fused.values():
        parts.sort(key=lambda name: next((order[word][1] for word in name.split(".") if word in order), 0))
    return fused


def export(
    policy: Policy,
    place: RankPlace | None,
    model: ModelConfig,
    folder: Path,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    more: Callable[[Path], None] | None = None,
) -> None:
    """Write weights, config and tokenizer as transformers and SGLang load them. A collective.

    The folder appears complete or not at all. Weights of more than `max_file_bytes` are split into several
    files with an index. Every rank writes its own parts of the weights, so all ranks need the same file
    system; the first one writes all else.

    Args:
        place: None in a process without ranks.
        more: writes additional files into the folder before it appears.

    Raises:
        DiskError: the folder could not be written, for example because the disk is full.
    """
    specs = tensor_specs(policy)
    spec_of = {spec.name: spec for spec in specs}
    files = plan_files(specs, max_bytes=max_file_bytes)
    layouts = {file: lay_out([spec_of[name] for name in names]) for file, names in files.items()}
    writer = FolderWriter(folder) if place is None or place.is_first else None
    if writer is not None:
        for file, layout in layouts.items():
            writer.write(partial(_create, layout, file))
    parts = PartsWriter(policy)
    if _all_well(place, writer is None or writer.is_well):
        for file, layout in layouts.items():
            parts.write(partial_folder(folder) / file, layout)
    is_written = _all_well(place, (writer is None or writer.is_well) and parts.error is None)
    if parts.error is not None:
        if writer is not None:
            writer.discard()
        raise _not_written(folder, parts.error) from parts.error
    if writer is None:
        return
    if not is_written and writer.is_well:  # another rank raises
        writer.discard()
        return
    writer.write(partial(describe, policy, model))
    if more is not None:
        writer.write(more)
    writer.write(partial(write_index, files, specs))  # last: without it, split weights are not found
    writer.finish()


def _create(layout: FileLayout, file: str, folder: Path) -> None:
    layout.create(folder / file)


def _all_well(place: RankPlace | None, is_well: bool) -> bool:
    """Return whether all ranks are well. A collective."""
    if place is None or place.world_size == 1:
        return is_well
    return largest_over_ranks({"failed": float(not is_well)})["failed"] == 0


def adapter_specs(policy: Policy) -> list[TensorSpec]:
    """Return name (as in peft's files), dtype, shape and bytes of every tensor of the adapter, and of those
    of roles, if there are any.
    """
    return [
        spec
        for adapters in (policy.adapters, *policy.role_adapters.values())
        for spec in _specs(
            {name: tuple(tensor.shape) for name, tensor in adapter_tensors(adapters).items()},
            policy.published_dtype,
        )
    ]


def _specs(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> list[TensorSpec]:
    name_of_dtype = str(dtype).removeprefix("torch.")
    return [
        TensorSpec(name, name_of_dtype, shape, math.prod(shape) * dtype.itemsize)
        for name, shape in shapes.items()
    ]


def adapter_checksums(policy: Policy) -> dict[str, str]:
    """Return {name: sha256} of the tensors of all adapters as `export_adapter` writes them, by the names that
    servers give them.
    """
    return {
        adapter_tensor(adapter, name): tensor_checksum(tensor)
        for adapter, low_ranks in _all_adapters(policy).items()
        for name, tensor in _whole_adapter(policy, low_ranks).items()
    }


def export_adapter(policy: Policy, place: RankPlace | None, model: ModelConfig, folder: Path) -> None:
    """Write only the adapter, in peft's and SGLang's format, and those of roles in folders of their names
    within. The folder appears complete or not at all.

    Raises:
        DiskError: the folder could not be written.
    """
    tensors = {
        adapter: _whole_adapter(policy, low_ranks) for adapter, low_ranks in _all_adapters(policy).items()
    }
    if place is None or place.is_first:
        writer = FolderWriter(folder)
        writer.write(partial(_write_adapters, tensors, model))
        writer.finish()


def _write_adapters(tensors: Mapping[str, Mapping[str, Tensor]], model: ModelConfig, folder: Path) -> None:
    for adapter, own in tensors.items():
        target = adapter_folder(folder, adapter)
        target.mkdir(exist_ok=True)
        write_adapter(own, model.lora, model.path, target)


def adapter_folder(folder: Path, adapter: str) -> Path:
    """Return where an adapter is in a folder that `export_adapter` wrote."""
    return folder if adapter == POLICY_ADAPTER else folder / adapter


def _all_adapters(policy: Policy) -> dict[str, Mapping[str, LowRank]]:
    """Return the adapters by their names on servers."""
    return {POLICY_ADAPTER: policy.adapters, **policy.role_adapters}


def _whole_adapter(policy: Policy, adapters: Mapping[str, LowRank]) -> dict[str, Tensor]:
    # In the published dtype: the learner's own forward also casts the adapter to it.
    return {
        name: gather(tensor).to(policy.published_dtype).cpu()
        for name, tensor in adapter_tensors(adapters).items()
    }


def describe(policy: Policy, model: ModelConfig, folder: Path) -> None:
    """Write the Hugging Face folder without weights: configs, tokenizer, chat template, the model's code."""
    _write_configs(policy, folder)
    copy_tokenizer(model, folder)


def plan_files(specs: Sequence[TensorSpec], *, max_bytes: int) -> dict[str, list[str]]:
    """Return {file name: its tensor names} in order.

    A file has at most `max_bytes`, unless a single tensor is larger.
    """
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


def pickle_bucket(policy: Policy, place: RankPlace, names: Sequence[str]) -> str:
    """Return [(name, tensor)] pickled, in base64; empty on all ranks but 0. A collective.

    The pickles contain the data itself: SGLang's unpickler allows the functions they need, and no shared
    memory has to outlive the call.
    """
    tensors = list(policy.full_tensors(names))
    if not place.is_first:
        return ""
    # Cloned, because a pickle of a view contains all of its memory.
    return base64.b64encode(
        pickle.dumps(
            [(name, tensor.cpu().clone(memory_format=torch.contiguous_format)) for name, tensor in tensors]
        )
    ).decode()


class FolderWriter:
    """Writes a folder under a temporary name and renames it when it is complete.

    The first failure is kept and raised by `finish`: raising it earlier would leave the other ranks waiting
    in the next collectives.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._partial = partial_folder(folder)
        self._error: OSError | None = None
        self.discard()
        self.write(lambda folder: folder.mkdir(parents=True))

    @property
    def is_well(self) -> bool:
        """Whether no write has failed."""
        return self._error is None

    def write(self, write: Callable[[Path], None]) -> None:
        """Run `write(folder)` on the temporary folder, unless an earlier write failed."""
        if self._error is None:
            try:
                write(self._partial)
            except (OSError, SafetensorError) as error:
                self._error = OSError(str(error))

    def finish(self) -> None:
        """Rename the folder to its final name; raise DiskError if any write failed."""
        self.write(self._replace)
        if self._error is not None:
            self.discard()
            raise _not_written(self._folder, self._error) from self._error

    def discard(self) -> None:
        """Remove the temporary folder, if it was not renamed."""
        shutil.rmtree(self._partial, ignore_errors=True)

    def _replace(self, written: Path) -> None:
        # A rename may reach the disk before the data: after a power failure the folder would exist, but be
        # empty.
        for path in [*written.iterdir(), written]:
            sync(path)
        if self._folder.exists():
            shutil.rmtree(self._folder)
        written.rename(self._folder)


def partial_folder(folder: Path) -> Path:
    """Return the temporary name under which a folder is written."""
    return folder.with_name(f".{folder.name}.partial")


def _not_written(folder: Path, error: OSError) -> DiskError:
    return DiskError(f"the policy could not be written to {folder}: {error}")


def write_index(files: Mapping[str, Sequence[str]], specs: Sequence[TensorSpec], folder: Path) -> None:
    """Write the index of weights that are split into several files; nothing for a single file."""
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(spec.num_bytes for spec in specs)},
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        (folder / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2) + "\n", encoding="utf-8"
        )


def _write_configs(policy: Policy, folder: Path) -> None:
    config = policy.module.config
    config.architectures = [policy.class_name]  # FSDP renames the classes of sharded modules
    config.dtype = policy.published_dtype
    config.save_pretrained(folder)
    generation = getattr(policy.module, "generation_config", None)  # None for a reward model
    if generation is not None:
        generation.save_pretrained(folder)


def copy_tokenizer(model: ModelConfig, folder: Path) -> None:
    """Copy the tokenizer's files, the chat template in use, and the model's own code."""
    source = Path(model.tokenizer_path or model.path)
    patterns = (*_COPIED, "*.py") if model.trust_remote_code else _COPIED
    files = (
        {file for pattern in patterns for file in source.glob(pattern) if file.is_file()}
        if source.is_dir()
        else set()
    )
    for file in files:
        shutil.copyfile(file, folder / file.name)
    if model.chat_template is not None:
        shutil.copyfile(find_template(model.chat_template), folder / "chat_template.jinja")
