"""Packing of pieces with a common prompt behind a single copy of it; usually the attempts of a group.

A response attends to the prompt and to itself, and its positions continue after the prompt. The result is the
same as without sharing, but the prompt is computed once. Gradients of its keys and values add up over the
responses. P tokens of the prompt, all of them context.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PackedPiece:
    """Segments of one sample that are packed together, all of them or a single one: only their lengths.

    sample: index of the sample in the list to pack.
    segment: index of the single segment in its sample; None: all segments.
    lengths: tokens of each segment.
    num_actions: action tokens.
    first_place: action tokens of the sample before this piece.
    is_split, is_counted: see `Microbatch`.
    loss_length: loss tokens of the whole sample.
    prompt: of a single segment, see `SampleShape`; None: it shares its prompt with no other piece.
    """

    sample: int
    segment: int | None
    lengths: tuple[int, ...]
    num_actions: int
    first_place: int
    is_split: bool
    is_counted: bool
    loss_length: int
    prompt: tuple[int, Hashable] | None

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class Bundle:
    """A unit of packing: a single piece, or several that share their first `prefix` tokens, the prompt."""

    pieces: tuple[PackedPiece, ...]
    prefix: int = 0

    @property
    def num_tokens(self) -> int:
        return self.prefix + sum(p.num_tokens - self.prefix for p in self.pieces)

    @property
    def segments(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Lengths of its segments, i64[G], and which segment each one continues, i64[G] (-1: none)."""
        if self.prefix == 0:
            lengths = np.array([length for p in self.pieces for length in p.lengths], np.int64)
            return lengths, np.full(len(lengths), -1)
        lengths = np.array([self.prefix, *(p.num_tokens - self.prefix for p in self.pieces)], np.int64)
        return lengths, np.array([-1, *(0 for _ in self.pieces)], np.int64)

    def places(self) -> list[NDArray[np.int64]]:
        """Return i64[T] per piece, the positions of its tokens in the bundle."""
        found, start = [], self.prefix
        for piece in self.pieces:
            own = piece.num_tokens - self.prefix
            found.append(np.concatenate([np.arange(self.prefix), np.arange(start, start + own)]))
            start += own
        return found


def share_prefixes(pieces: Sequence[PackedPiece], *, max_tokens: int, world_size: int) -> list[Bundle]:
    """Bundle the pieces with the same prompt, at most `max_tokens` per bundle.

    Only pieces of a single segment share a prompt. The prompt ends at the first token that the policy
    sampled. If a bundle holds more than one rank's share of all tokens, it is cut into as many bundles as it
    has shares; otherwise some of the `world_size` ranks would wait for it.
    """
    by_prompt: dict[tuple[int, Hashable], list[PackedPiece]] = {}
    alone = []
    for piece in pieces:
        if piece.prompt is None:
            alone.append(Bundle((piece,)))
        else:
            by_prompt.setdefault(piece.prompt, []).append(piece)
    whole = {prompt: _as_bundle(members, prompt[0]) for prompt, members in by_prompt.items()}
    num_tokens = sum(b.num_tokens for b in (*alone, *whole.values()))
    fitted = [
        b
        for (prefix, _), bundle in whole.items()
        for b in _fit(
            bundle.pieces, prefix, max_tokens, least=-(-world_size * bundle.num_tokens // num_tokens)
        )
    ]
    return [*alone, *fitted]


def _fit(members: Sequence[PackedPiece], prefix: int, max_tokens: int, least: int) -> list[Bundle]:
    """Distribute pieces of one prompt over as few bundles as fit, at least `least`, with balanced
    responses.
    """
    ordered = sorted(members, key=lambda p: -p.num_tokens)
    responses = sum(p.num_tokens - prefix for p in members)
    fewest = -(-responses // max(1, max_tokens - prefix))
    for count in range(max(least, fewest), len(members)):
        parts: list[list[PackedPiece]] = [[] for _ in range(count)]
        for piece in ordered:
            min(parts, key=lambda part: sum(p.num_tokens - prefix for p in part)).append(piece)
        bundles = [_as_bundle(part, prefix) for part in parts]
        if all(b.num_tokens <= max_tokens for b in bundles):
            return bundles
    return [_as_bundle([piece], prefix) for piece in members]


def _as_bundle(pieces: Sequence[PackedPiece], prefix: int) -> Bundle:
    return Bundle(tuple(pieces), prefix if len(pieces) > 1 else 0)
