"""The weights of the served model: an update is checked as a whole, then applied in place.

Nothing changes until all names, shapes and dtypes are valid and all values are here and finite. The
overwritten values are kept until a forward of the new weights has been finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from agentrl.extras.embedded.bounded_repr import cut, shown
from agentrl.servers.process_group import broadcast, tensor_bytes, tensor_checksum, unflatten
from agentrl.servers.weight_changes import CHANGES_FILE, NAME_FILE, NAME_KEY, POSITIONS, VALUES, changed_name
from agentrl.servers.weight_names import find_pieces

_INDEX = "model.safetensors.index.json"
_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
"""Accepted dtypes of incoming weights. Quantized weights would need their scales."""


class WeightsRefused(Exception):
    """An update was refused; the weights are unchanged."""


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """Name, dtype and shape of one incoming weight."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Changes:
    """A sparse update: it turns the weights called `base` into those called `name`.

    whole: complete tensors by name. elements: by name, positions i64[n] in the flat tensor and their values
        [n].
    """

    base: str
    name: str
    whole: Mapping[str, Tensor]
    elements: Mapping[str, tuple[Tensor, Tensor]]


class Undo:
    """The values that an update overwrote. A whole old tensor reuses the memory of the new one."""

    def __init__(self) -> None:
        self._steps: list[
            tuple[Tensor, Tensor | None, Tensor]
        ] = []  # weight, flat positions (None: all), old values

    @torch.no_grad()
    def swap(self, target: Tensor, new: Tensor) -> None:
        """Exchange the values of `target` and `new`, which have one dtype.

        `new` then keeps the old values.
        """
        old = target.clone()
        target.copy_(new)
        self._steps.append((target, None, new.copy_(old)))

    @torch.no_grad()
    def put(self, target: Tensor, positions: Tensor, values: Tensor) -> None:
        """Set the elements of `target` at the flat positions i64[n] to `values` [n]."""
        flat = target.view(-1)
        self._steps.append((flat, positions, flat[positions]))
        flat[positions] = values.to(flat.device)

    @property
    def is_needed(self) -> bool:
        """Whether anything was overwritten."""
        return bool(self._steps)

    def extend(self, later: Undo) -> None:
        """Append what a later update overwrote."""
        self._steps += later._steps

    @torch.no_grad()
    def restore(self) -> None:
        """Restore all values, in reverse order: tied weights are one storage under two names."""
        while self._steps:
            target, positions, old = self._steps.pop()
            if positions is None:
                target.copy_(old)
            else:
                target[positions] = old


class Weights:
    """All parameters of a model by their names in files, as SGLang knows them: one per expert.

    Tied ones have two names and one storage.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        own = model.state_dict()
        self._targets: dict[str, Tensor] = {
            name: piece.of(own[piece.weight].detach()) for name, piece in find_pieces(model).items()
        }
        self._device = model.device

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse unknown names and wrong shapes."""
        unknown = sorted(set(shapes) - set(self._targets))
        if unknown:
            raise WeightsRefused(
                f"{len(unknown)} names are no weights of this model, the first is {shown(unknown[0])}"
            )
        for name, shape in shapes.items():
            expected = tuple(self._targets[name].shape)
            if tuple(shape) != expected:
                raise WeightsRefused(
                    f"{name!r} has shape {shown(list(shape))}; this model's is {list(expected)}"
                )

    def check_complete(self, names: Sequence[str]) -> None:
        """Refuse an incomplete set of weights. Of tied weights, one name is enough."""
        covered = {self._targets[name].data_ptr() for name in names}
        missing = sorted(name for name, tensor in self._targets.items() if tensor.data_ptr() not in covered)
        if missing:
            raise WeightsRefused(f"{len(missing)} weights are missing, the first is {missing[0]!r}")

    def read_folder(self, folder: str) -> dict[str, Tensor]:
        """Read and check a complete set of weights from the safetensors of `folder`, in this model's
        dtypes.
        """
        tensors: dict[str, Tensor] = {}
        with reading(Path(folder)):
            files = _weight_files(Path(folder))
        for file in files:
            with reading(file), safe_open(file, framework="pt") as opened:
                names = list(opened.keys())
                self.check({name: tuple(opened.get_slice(name).get_shape()) for name in names})
                tensors |= {name: self._fitted(name, opened.get_tensor(name)) for name in names}
        self.check_complete(list(tensors))
        return tensors

    def read_changes(self, folder: str) -> Changes:
        """Read the changes in `folder`, checked against their own name (a checksum) and against this
        model.
        """
        file = Path(folder) / CHANGES_FILE
        with reading(file), safe_open(file, framework="pt") as opened:
            names = opened.metadata() or {}
            parts = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  # not a mapping
        base, name = names.get("base", ""), names.get("name", "")
        if changed_name(base, {key: tensor_bytes(part) for key, part in parts.items()}) != name:
            raise WeightsRefused(f"the checksum of {file} does not agree with what is in it")
        whole = {key: part for key, part in parts.items() if not key.endswith((POSITIONS, VALUES))}
        self.check({key: tuple(tensor.shape) for key, tensor in whole.items()})
        changed = sorted({key.removesuffix(VALUES).removesuffix(POSITIONS) for key in parts} - set(whole))
        elements = {
            key: self._elements(key, parts.get(key + POSITIONS), parts.get(key + VALUES)) for key in changed
        }
        return Changes(base, name, {key: self._fitted(key, part) for key, part in whole.items()}, elements)

    def _elements(self, name: str, positions: Tensor | None, values: Tensor | None) -> tuple[Tensor, Tensor]:
        target = self._targets.get(name)
        if target is None:
            raise WeightsRefused(f"{shown(name)} is no weight of this model")
        if (
            positions is None
            or values is None
            or positions.dtype not in (torch.int32, torch.int64)
            or not positions.numel()
        ):
            raise WeightsRefused(f"the changes of {name!r} must be integer positions and their values")
        if (
            positions.shape != values.shape
            or positions.ndim != 1
            or not 0 <= int(positions.min()) <= int(positions.max()) < target.numel()
        ):
            raise WeightsRefused(f"the changes of {name!r} do not lie in its {target.numel()} elements")
        return positions.long().to(self._device), self._fitted(name, values)

    def _fitted(self, name: str, tensor: Tensor) -> Tensor:
        """Return a weight in this model's dtype; refuse unknown dtypes and non-finite values."""
        target = self._targets[name]
        if tensor.dtype not in _DTYPES and tensor.dtype != target.dtype:
            raise WeightsRefused(
                f"{name!r} is of {tensor.dtype}; this server takes float32, bfloat16, float16 and float64"
            )
        fitted = tensor.to(target.dtype)  # not moved to the GPU, which has no room for a second model
        check_finite({name: fitted})
        return fitted

    def receive(
        self, specs: Sequence[WeightSpec], group: ProcessGroup, *, is_bucket: bool
    ) -> dict[str, Tensor]:
        """Receive the weights that rank 0 of `group` broadcasts, one by one or in one flat byte bucket.

        Raises:
            WeightsRefused: the names, shapes, dtypes or values do not fit the model.
            InfrastructureError: the broadcast failed.
        """
        self.check({spec.name: spec.shape for spec in specs})
        if is_bucket:
            sizes = [spec.dtype.itemsize * torch.Size(spec.shape).numel() for spec in specs]
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            broadcast(flat, group)
            tensors = dict(
                zip(
                    (s.name for s in specs), unflatten(flat, [(s.dtype, s.shape) for s in specs]), strict=True
                )
            )
        else:
            tensors = {}
            for spec in specs:
                tensors[spec.name] = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
                broadcast(tensors[spec.name], group)
        return {name: self._fitted(name, tensor) for name, tensor in tensors.items()}

    def replace(self, tensors: Mapping[str, Tensor]) -> Undo:
        """Swap the model's weights with fitted tensors of the same names. The engine must be parked."""
        undo = Undo()
        for name, tensor in tensors.items():
            undo.swap(self._targets[name], tensor)
        return undo

    def change(self, changes: Changes) -> Undo:
        """Apply checked changes to the model's weights. The engine must be parked."""
        undo = self.replace(changes.whole)
        for name, (positions, values) in changes.elements.items():
            undo.put(self._targets[name], positions, values)
        return undo

    def checksums(self) -> dict[str, str]:
        """Return {name: sha256 of the raw bytes in the served dtype}."""
        return {name: tensor_checksum(tensor) for name, tensor in self._targets.items()}


def name_of(folder: str) -> str | None:
    """Return the learner's name for the weights in `folder`, or None. Later changes name it as their base."""
    file = Path(folder) / NAME_FILE
    with reading(file):
        if not file.is_file():
            return None
        name = orjson.loads(file.read_bytes())[NAME_KEY]
    if not isinstance(name, str):
        raise WeightsRefused(f"{file}: {NAME_KEY} must be a string, got {shown(name)}")
    return name


def parse_specs(names: Sequence[Any], dtypes: Sequence[Any], shapes: Sequence[Any]) -> list[WeightSpec]:
    """Parse the three parallel lists of SGLang's distributed update; raise WeightsRefused if invalid."""
    if not len(names) == len(dtypes) == len(shapes) or not names:
        raise WeightsRefused(
            f"names, dtypes and shapes must be as many, and at least one; they are {len(names)}, "
            f"{len(dtypes)}, {len(shapes)}"
        )
    return [
        WeightSpec(_name(name), _dtype(dtype), _shape(shape))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise WeightsRefused(f"the name of a weight must be a string, got {shown(name)}")
    return name


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, str(name).removeprefix("torch."), None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype) or dtype not in _DTYPES:
        raise WeightsRefused(
            f"unknown dtype {shown(name)} of a weight; write float32, bfloat16, float16 or float64"
        )
    return dtype


def _shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, (list, tuple)) or not all(type(size) is int and size >= 0 for size in shape):
        raise WeightsRefused(f"the shape of a weight must be a list of sizes, got {shown(shape)}")
    return tuple(shape)


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / _INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        raise WeightsRefused(f"{folder} has neither {single.name} nor {_INDEX}")
    names = sorted(set(orjson.loads(index.read_bytes())["weight_map"].values()))
    strange = [name for name in names if Path(name).name != name]
    if strange:
        raise WeightsRefused(f"{index} names {shown(strange[0])}, which is no file of its folder")
    return [folder / name for name in names]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any failure to read `path`, a file or folder that others wrote, into WeightsRefused."""
    try:
        yield
    except WeightsRefused:
        raise
    except (
        Exception
    ) as error:  # boundary of a foreign file: OSError, SafetensorError, or anything that a parser raises
        raise WeightsRefused(
            f"{cut(str(path))} cannot be read: {type(error).__name__}: {cut(str(error))}"
        ) from error


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    # A model that computes NaN cannot be sampled from: the engine would end.
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise WeightsRefused(f"{name!r} holds values that are not finite")
