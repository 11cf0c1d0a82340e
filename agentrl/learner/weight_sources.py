"""Where the values of a model's weights are stored, by the rules with which transformers loads folders.

A weight is one stored tensor, or several that are stacked and concatenated, as the experts of a layer are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl.learner.stored_weights import StoredTensor

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


def find_sources(
    module: PreTrainedModel, stored: Mapping[str, StoredTensor]
) -> tuple[dict[str, Source], dict[str, str]] | None:
    """Return {weight: its source} and {stored name: its name in the model} of what the model does not have.

    None if weights are converted in a way that cannot be sliced.
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
        shape = stored[name].shape
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
