"""Names of weights in files, and what each of them is of a model, by the rules of transformers.

A weight of a model is one stored tensor, or several that are stacked and concatenated: files have one name
per expert, and the model has one weight for all experts of a layer. `find_sources` is for loading: where the
values of a weight are stored. `find_pieces` is the reverse, for everything that leaves the learner or reaches
a server: SGLang and `save_pretrained` know the names in files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:  # takes seconds to import; the controller needs only the names of this module
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class StoredPart:
    """The stored tensor `name`, seen as `shape`, at `start` of a weight."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """Where the values of a weight of `shape` are stored."""

    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of `extent` at `start` of a model's weight, which files store as one tensor of `shape`."""

    weight: str
    start: tuple[int, ...]
    extent: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def whole(weight: str, shape: Sequence[int]) -> Piece:
        """Return the piece that is all of a weight."""
        return Piece(weight, (0,) * len(shape), tuple(shape), tuple(shape))

    def of(self, rows: Tensor, *, first_row: int = 0) -> Tensor:
        """Return a view of this piece in its weight, of which `rows` are the rows from `first_row` on."""
        if not self.start:
            return rows
        start = (self.start[0] - first_row, *self.start[1:])
        box = tuple(slice(a, a + size) for a, size in zip(start, self.extent, strict=True))
        return rows[box].view(self.shape)


def find_pieces(module: PreTrainedModel) -> dict[str, Piece]:
    """Return {name in files: what it is of the model}, in order of the model's weights and of their values.

    Names and shapes are those of `save_pretrained`; every tied weight is included. A model whose conversion
    cannot be expressed by contiguous pieces keeps its own names. No value is read.
    """
    from transformers.core_model_loading import revert_weight_conversion

    shapes = {name: tuple(weight.shape) for name, weight in module.state_dict().items()}
    own = {name: Piece.whole(name, shape) for name, shape in shapes.items()}
    with _default_rules(module):
        written = revert_weight_conversion(
            module, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        )
    stored = {name: tuple(tensor.shape) for name, tensor in written.items()}
    found = find_sources(module, stored)
    if found is None or found[1] or {name: source.shape for name, source in found[0].items()} != shapes:
        return own
    pieces = {
        part.name: Piece(name, part.start, part.shape, stored[part.name])
        for name in shapes
        for part in sorted(found[0][name].parts, key=lambda part: part.start)
    }
    is_plain = all(is_contiguous(piece.extent, shapes[piece.weight]) for piece in pieces.values())
    return pieces if is_plain else own


def is_contiguous(extent: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether the elements of a part of a weight of `shape` follow each other in memory."""
    first = next((dim for dim, size in enumerate(extent) if size > 1), len(extent))
    return tuple(extent[first + 1 :]) == tuple(shape[first + 1 :])


@contextmanager
def _default_rules(module: PreTrainedModel) -> Iterator[None]:
    """Hide how transformers loaded a model: names must not depend on who loaded it, and from where."""
    kept = vars(module).pop("_weight_conversions", None)
    try:
        yield
    finally:
        if kept is not None:
            module._weight_conversions = kept


def find_sources(
    module: PreTrainedModel, stored: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Source], dict[str, str]] | None:
    """Return {weight: its source} and {stored name: its name in the model} of what the model does not have.

    None if weights are converted in a way that cannot be sliced.

    Args:
        stored: shapes by name.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    rules = get_model_conversion_mapping(module)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    if len(renamings) + len(converters) < len(rules):
        return None
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix, weights = module.base_model_prefix, module.state_dict()
    sources: dict[str, Source] = {}
    to_convert: dict[str, tuple[WeightConverter, dict[str, list[Source]]]] = {}
    surplus = {}
    for name in sorted(stored, key=dot_natural_key):
        shape = stored[name]
        source = Source(shape, (StoredPart(name, (0,) * len(shape), shape),))
        own, pattern = rename_source_key(name, renamings, converters, prefix, weights)
        if own not in weights and name in weights:
            own, pattern = rename_source_key(name, [], [], prefix, weights)
        if own not in weights:
            surplus[name] = own
        elif pattern is None:
            sources.setdefault(own, source)
        else:
            rule, parts = to_convert.setdefault(own, (by_pattern[pattern], {}))
            parts.setdefault(pattern, []).append(source)
    for own, (rule, parts) in to_convert.items():
        converted = _convert(rule, parts)
        if converted is None:
            return None
        sources[own] = converted
    return sources, surplus


def _convert(rule: Any, parts: Mapping[str, list[Source]]) -> Source | None:
    """Return the source of a weight that is stacked and concatenated; None for other operations."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    current = {pattern: list(sources) for pattern, sources in parts.items()}
    for operation in rule.operations:
        if type(operation) is MergeModulelist and operation.dim == 0:
            current = {pattern: [_stack(sources)] for pattern, sources in current.items()}
        elif type(operation) is Concatenate:
            ordered = [s for pattern in rule.source_patterns for s in current.get(pattern, [])]
            current = {rule.target_patterns[0]: [_concatenate(ordered, operation.dim)]}
        else:
            return None
    left = [source for sources in current.values() for source in sources]
    return left[0] if len(left) == 1 and len(rule.target_patterns) == 1 else None


def _stack(sources: Sequence[Source]) -> Source:
    one = [
        Source(
            (1, *source.shape),
            tuple(StoredPart(b.name, (0, *b.start), (1, *b.shape)) for b in source.parts),
        )
        for source in sources
    ]
    return _concatenate(one, 0)


def _concatenate(sources: Sequence[Source], dim: int) -> Source:
    parts, end = [], 0
    for source in sources:
        for part in source.parts:
            start = list(part.start)
            start[dim] += end
            parts.append(StoredPart(part.name, tuple(start), part.shape))
        end += source.shape[dim]
    shape = list(sources[0].shape)
    shape[dim] = end
    return Source(tuple(shape), tuple(parts))
