"""Packing of pieces with a common prompt behind a single copy of it; usually the attempts of a group.

A response attends to the prompt and to itself, and its positions continue after the prompt. The result is the
same as without sharing, but the prompt is computed once. Gradients of its keys and values add up over the
responses. P tokens of the prompt, all of them context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.learner.batch import Sample


@dataclass(frozen=True, slots=True, eq=False)
class SequencePart:
    """A piece: segments of one sequence that are packed together, either all of them or a single one.

    sample: of the whole sequence, or of a single segment.
    first_place: action tokens of the sequence before this piece.
    is_split, is_counted: see `Microbatch`.
    loss_length: loss tokens of the whole sequence.
    """

    sample: Sample
    first_place: int
    is_split: bool
    is_counted: bool
    loss_length: int


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """A unit of packing: a single piece, or several that share their first `prefix` tokens, the prompt."""

    pieces: tuple[SequencePart, ...]
    prefix: int = 0

    @property
    def num_tokens(self) -> int:
        return self.prefix + sum(p.sample.num_tokens - self.prefix for p in self.pieces)

    @property
    def segments(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Lengths of its segments, i64[G], and which segment each one continues, i64[G] (-1: none)."""
        if self.prefix == 0:
            lengths = np.concatenate([p.sample.segment_lengths for p in self.pieces])
            return lengths, np.full(len(lengths), -1)
        lengths = np.array([self.prefix, *(p.sample.num_tokens - self.prefix for p in self.pieces)], np.int64)
        return lengths, np.array([-1, *(0 for _ in self.pieces)], np.int64)

    def places(self) -> list[NDArray[np.int64]]:
        """Return i64[T] per piece, the positions of its tokens in the bundle."""
        found, start = [], self.prefix
        for piece in self.pieces:
            own = piece.sample.num_tokens - self.prefix
            found.append(np.concatenate([np.arange(self.prefix), np.arange(start, start + own)]))
            start += own
        return found


def share_prefixes(pieces: Sequence[SequencePart], *, max_tokens: int, world_size: int) -> list[Bundle]:
    """Bundle the pieces with the same prompt, at most `max_tokens` per bundle.

    Only pieces of a single segment share a prompt. The prompt ends at the first token that the policy
    sampled. If a bundle holds more than one rank's share of all tokens, it is cut into as many bundles as it
    has shares; otherwise some of the `world_size` ranks would wait for it.
    """
    by_prompt: dict[bytes, list[SequencePart]] = {}
    alone = []
    for piece in pieces:
        prompt = _prompt(piece.sample)
        if prompt is None:
            alone.append(Bundle((piece,)))
        else:
            by_prompt.setdefault(prompt.tobytes(), []).append(piece)
    whole = [_as_bundle(members, _prefix_length(members)) for members in by_prompt.values()]
    num_tokens = sum(b.num_tokens for b in (*alone, *whole))
    parts = [-(-world_size * b.num_tokens // num_tokens) for b in whole]
    return [
        *alone,
        *(
            b
            for bundle, least in zip(whole, parts, strict=True)
            for b in _fit(bundle.pieces, max_tokens, least)
        ),
    ]


def _prefix_length(members: Sequence[SequencePart]) -> int:
    return int(members[0].sample.action_mask.argmax())


def _prompt(sample: Sample) -> NDArray[np.int32] | None:
    """Return the tokens of a single segment before its first action.

    None for several segments, or without actions.
    """
    if len(sample.segment_starts) > 1 or not sample.action_mask.any():
        return None
    return sample.token_ids[: int(sample.action_mask.argmax())]


def _fit(members: Sequence[SequencePart], max_tokens: int, least: int) -> list[Bundle]:
    """Distribute pieces of one prompt over as few bundles as fit, at least `least`, with balanced
    responses.
    """
    prefix = _prefix_length(members)
    ordered = sorted(members, key=lambda p: -p.sample.num_tokens)
    responses = sum(p.sample.num_tokens - prefix for p in members)
    fewest = -(-responses // max(1, max_tokens - prefix))
    for count in range(max(least, fewest), len(members)):
        parts: list[list[SequencePart]] = [[] for _ in range(count)]
        for piece in ordered:
            min(parts, key=lambda part: sum(p.sample.num_tokens - prefix for p in part)).append(piece)
        bundles = [_as_bundle(part, prefix) for part in parts]
        if all(b.num_tokens <= max_tokens for b in bundles):
            return bundles
    return [_as_bundle([piece], prefix) for piece in members]


def _as_bundle(pieces: Sequence[SequencePart], prefix: int) -> Bundle:
    return Bundle(tuple(pieces), prefix if len(pieces) > 1 else 0)
