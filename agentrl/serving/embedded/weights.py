"""The weights of the served model: checked as a whole, then replaced in place.

Nothing is changed before every name and shape of an update was found right, and all its bytes are here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from agentrl.sglang.process_group import broadcast, tensor_bytes, tensor_checksum, unflatten
from agentrl.sglang.weight_changes import CHANGES_FILE, NAME_FILE, NAME_KEY, POSITIONS, VALUES, changed_name

_INDEX = "model.safetensors.index.json"


class WeightsRefused(Exception):
    """An update was refused, and nothing was changed."""


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """Name, dtype and shape of one weight to come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Changes:
    """What a folder of changes makes of the weights called `base`: those called `name`.

    whole: tensors by name. elements: by name, positions i64[n] in the flat tensor and their values [n].
    """

    base: str
    name: str
    whole: Mapping[str, Tensor]
    elements: Mapping[str, tuple[Tensor, Tensor]]


class Weights:
    """All parameters of a model by their Hugging Face names; tied ones have two names and one storage."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._targets: dict[str, Tensor] = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self._device = model.device

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse unknown names and wrong shapes."""
        unknown = sorted(set(shapes) - set(self._targets))
        if unknown:
            raise WeightsRefused(f"{len(unknown)} names are no weights of this model, the first is {unknown[0]!r}")
        for name, shape in shapes.items():
            expected = tuple(self._targets[name].shape)
            if tuple(shape) != expected:
                raise WeightsRefused(f"{name!r} has shape {list(shape)}; this model's is {list(expected)}")

    def check_complete(self, names: Sequence[str]) -> None:
        """Refuse a set of weights that leaves any old one in place; of tied weights one is enough."""
        covered = {self._targets[name].data_ptr() for name in names}
        missing = sorted(name for name, tensor in self._targets.items() if tensor.data_ptr() not in covered)
        if missing:
            raise WeightsRefused(f"{len(missing)} weights are missing, the first is {missing[0]!r}")

    def read_folder(self, folder: str) -> dict[str, Tensor]:
        """Read a complete set of weights from the safetensors of `folder`, checked."""
        tensors: dict[str, Tensor] = {}
        for file in _weight_files(Path(folder)):
            try:
                tensors.update(load_file(file))
            except (OSError, SafetensorError) as error:
                raise WeightsRefused(f"{file} cannot be read: {error}") from error
        self.check({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        self.check_complete(list(tensors))
        check_finite(tensors)
        return tensors

    def read_changes(self, folder: str) -> Changes:
        """Read the changes of `folder`, checked against their own name and against this model."""
        file = Path(folder) / CHANGES_FILE
        try:
            with safe_open(file, framework="pt") as opened:
                names = opened.metadata() or {}
                parts = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  # not a mapping
        except (OSError, SafetensorError) as error:
            raise WeightsRefused(f"{file} cannot be read: {error}") from error
        base, name = names.get("base", ""), names.get("name", "")
        if changed_name(base, {key: tensor_bytes(part) for key, part in parts.items()}) != name:
            raise WeightsRefused(f"the checksum of {file} does not agree with what is in it")
        check_finite({key: part for key, part in parts.items() if not key.endswith(POSITIONS)})
        changed = sorted(key.removesuffix(VALUES) for key in parts if key.endswith(VALUES))
        elements = {key: (parts[key + POSITIONS].long(), parts[key + VALUES]) for key in changed}
        whole = {key: part for key, part in parts.items() if not key.endswith((POSITIONS, VALUES))}
        self.check({key: tuple(tensor.shape) for key, tensor in whole.items()})
        for key, (positions, values) in elements.items():
            self._check_elements(key, positions, values)
        return Changes(base, name, whole, elements)

    def _check_elements(self, name: str, positions: Tensor, values: Tensor) -> None:
        target = self._targets.get(name)
        if target is None:
            raise WeightsRefused(f"{name!r} is no weight of this model")
        if positions.shape != values.shape or not 0 <= int(positions.min()) <= int(positions.max()) < target.numel():
            raise WeightsRefused(f"the changes of {name!r} do not lie in its {target.numel()} elements")

    @torch.no_grad()
    def change(self, changes: Changes) -> None:
        """Copy checked changes over the model's own weights. The caller holds the engine parked."""
        self.replace(changes.whole)
        for name, (positions, values) in changes.elements.items():
            target = self._targets[name]
            target.view(-1)[positions.to(target.device)] = values.to(target.device, target.dtype)

    def receive(self, specs: Sequence[WeightSpec], group: ProcessGroup, *, is_bucket: bool) -> dict[str, Tensor]:
        """Receive the weights that rank 0 of `group` broadcasts, each by itself or all in one flat byte bucket."""
        self.check({spec.name: spec.shape for spec in specs})
        if is_bucket:
            sizes = [spec.dtype.itemsize * torch.Size(spec.shape).numel() for spec in specs]
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            broadcast(flat, group)
            tensors = dict(zip((s.name for s in specs), unflatten(flat, [(s.dtype, s.shape) for s in specs]), strict=True))
        else:
            tensors = {}
            for spec in specs:
                tensors[spec.name] = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
                broadcast(tensors[spec.name], group)
        check_finite(tensors)
        return tensors

    @torch.no_grad()
    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy checked tensors over the model's own. The caller holds the engine parked."""
        for name, tensor in tensors.items():
            self._targets[name].copy_(tensor)

    def checksums(self) -> dict[str, str]:
        """Return {name: sha256 of the raw bytes, as stored in the served dtype}."""
        return {name: tensor_checksum(tensor) for name, tensor in self._targets.items()}


def name_of(folder: str) -> str | None:
    """Return how the learner called the weights of `folder`, by which it says later on what changes stand on; None: it did not."""
    file = Path(folder) / NAME_FILE
    return str(orjson.loads(file.read_bytes())[NAME_KEY]) if file.is_file() else None


def parse_specs(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[WeightSpec]:
    """Read the three parallel lists of SGLang's distributed update."""
    if not len(names) == len(dtypes) == len(shapes) or not names:
        raise WeightsRefused(
            f"names, dtypes and shapes must be as many, and at least one; they are {len(names)}, {len(dtypes)}, {len(shapes)}"
        )
    return [WeightSpec(str(name), _dtype(dtype), tuple(map(int, shape))) for name, dtype, shape in zip(names, dtypes, shapes, strict=True)]


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise WeightsRefused(f"unknown dtype {name!r}; write it like float32 or bfloat16")
    return dtype


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / _INDEX
    if single.is_file():
        return [single]
    if index.is_file():
        return [folder / name for name in sorted(set(orjson.loads(index.read_bytes())["weight_map"].values()))]
    raise WeightsRefused(f"{folder} has neither {single.name} nor {_INDEX}")


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    # A model that computes NaN cannot be sampled from: the engine would end.
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise WeightsRefused(f"{name!r} holds values that are not finite")
