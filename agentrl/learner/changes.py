"""Writing of only the published weights that an update changed: in bfloat16 a small step changes few of them.

A folder of changes has one file, and a second one for servers that cannot read the first:
    changes.safetensors         for each changed tensor NAME either `NAME|positions` (i32[n], indices into the
                                flat tensor) and `NAME|values` ([n]) or, where it is smaller, NAME itself;
                                the metadata name the base weights and the resulting weights, and have the
                                shapes of tensors of which only elements are written, as JSON
    tensors/model.safetensors   every changed tensor, whole, as any loader of Hugging Face folders reads it
Weights are named by a hash chain. Whole weights have a random name. Changed weights are named by the sha256
of their base's name and of the changes. A server with another base or a damaged file computes another name
than the file states.
"""

from __future__ import annotations

import json
import uuid
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from agentrl.config.model import ModelConfig
from agentrl.learner.model import Policy
from agentrl.learner.ranks import RankPlace
from agentrl.learner.weights import FolderWriter, export
from agentrl.servers.process_group import tensor_bytes
from agentrl.servers.weight_changes import (
    CHANGES_FILE,
    NAME_FILE,
    NAME_KEY,
    POSITIONS,
    SHAPES_KEY,
    VALUES,
    changed_name,
)

_MAX_POSITION = 2**31 - 1
_POSITION_BYTES = 4
_TENSORS_FILE = "model.safetensors"


class WrittenWeights:
    """The weights as last written; rank 0 keeps a copy in host memory. Every method is a collective."""

    def __init__(self, policy: Policy, place: RankPlace, model: ModelConfig) -> None:
        self._policy = policy
        self._place = place
        self._model = model
        self._copy: dict[str, Tensor] = {}
        self._changed: list[str] = []  # by the last `write_changes`
        self._name = ""

    def write_whole(self, folder: Path, *, is_again: bool) -> None:
        """Write all weights, for servers that do not have the previous version.

        is_again: write the weights of the last `write_changes` again, under the same name, as a whole model.

        Raises:
            InfrastructureError: the folder could not be written.
        """
        if not is_again:
            self._name = uuid.uuid4().hex
        export(self._policy, self._place, self._model, folder, more=partial(_write_name, self._name))
        if is_again:
            return
        for name, tensor in self._policy.full_tensors(list(self._policy.pieces)):
            if self._place.is_first:
                self._copy[name] = tensor.to("cpu", copy=True)

    def write_changes(self, folder: Path) -> int:
        """Write the differences to the last weights written; return the bytes of the file, 0 on all ranks
        but 0.

        Raises:
            InfrastructureError: the folder could not be written.
        """
        parts: dict[str, Tensor] = {}
        self._changed = []
        for name, published in self._policy.full_tensors(list(self._policy.pieces)):
            if self._place.is_first:
                full = published.to("cpu", copy=True).contiguous()
                changed = _changes_of(name, full, self._copy[name])
                if changed:
                    parts |= changed
                    self._changed.append(name)
                self._copy[name] = full
        if not self._place.is_first:
            return 0
        base, self._name = (
            self._name,
            changed_name(self._name, {key: tensor_bytes(part) for key, part in parts.items()}),
        )
        writer = FolderWriter(folder)
        shapes = {name: list(self._copy[name].shape) for name in self._changed if name not in parts}
        about = {"base": base, "name": self._name, SHAPES_KEY: json.dumps(shapes)}
        writer.write(partial(_write_parts, parts, about))
        writer.finish()
        return (folder / CHANGES_FILE).stat().st_size

    def write_changed_tensors(self, folder: Path) -> int:
        """Write each tensor that the last `write_changes` found changed, as a whole; return the bytes of the
        file, 0 on all ranks but 0.

        Raises:
            DiskError: the folder could not be written.
        """
        if not self._place.is_first:
            return 0
        writer = FolderWriter(folder)
        writer.write(partial(_write_tensors, {name: self._copy[name] for name in self._changed}))
        writer.finish()
        return (folder / _TENSORS_FILE).stat().st_size


def _changes_of(name: str, tensor: Tensor, base: Tensor) -> dict[str, Tensor]:
    flat = tensor.reshape(-1)
    # Compare bits: -0.0 == 0.0 and NaN != NaN as floats.
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    positions = torch.nonzero(flat.view(bits) != base.reshape(-1).view(bits)).reshape(-1)
    if not len(positions):
        return {}
    if len(positions) * (_POSITION_BYTES + flat.element_size()) >= flat.nbytes or len(flat) > _MAX_POSITION:
        return {name: tensor}
    return {name + POSITIONS: positions.to(torch.int32), name + VALUES: flat[positions]}


def _write_parts(parts: dict[str, Tensor], about: dict[str, str], folder: Path) -> None:
    save_file(parts, str(folder / CHANGES_FILE), metadata=about)
    # Safetensors creates private files, but a server may run under another account.
    (folder / CHANGES_FILE).chmod(0o644)


def _write_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    file = folder / _TENSORS_FILE
    save_file(tensors, str(file), metadata={"format": "pt"})
    file.chmod(0o644)


def _write_name(name: str, folder: Path) -> None:
    (folder / NAME_FILE).write_text(json.dumps({NAME_KEY: name}) + "\n", encoding="utf-8")
