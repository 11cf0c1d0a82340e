"""Rows that begin with one prompt, packed behind a single copy of it: the attempts of a group, as a rule.

A response attends to the prompt and to itself, and its positions go on where the prompt ends, so nothing changes but that the prompt is
computed once; gradients of its keys and values add up over the responses. P tokens of the prompt, all of them context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.learner.batch import Sample


@dataclass(frozen=True, slots=True, eq=False)
class SequencePart:
    """Rows of one sequence that stand together: all of them, or one.

    rows: the sample, or the part of it. first_place: action tokens of the sequence before these rows. loss_length: of the sequence.
    is_counted: see `Microbatch`.
    """

    rows: Sample
    first_place: int
    is_split: bool
    is_counted: bool
    loss_length: int


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """What is packed as one: a piece, or rows behind the prompt of `prefix` tokens that they all begin with."""

    pieces: tuple[SequencePart, ...]
    prefix: int = 0

    @property
    def num_tokens(self) -> int:
        return self.prefix + sum(p.rows.num_tokens - self.prefix for p in self.pieces)

    @property
    def segments(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Lengths i64[G] of its segments, and i64[G] which of them each one continues (-1: none)."""
        if self.prefix == 0:
            lengths = np.concatenate([p.rows.segment_lengths for p in self.pieces])
            return lengths, np.full(len(lengths), -1)
        lengths = np.array([self.prefix, *(p.rows.num_tokens - self.prefix for p in self.pieces)], np.int64)
        return lengths, np.array([-1, *(0 for _ in self.pieces)], np.int64)

    def places(self) -> list[NDArray[np.int64]]:
        """Return for each piece i64[T], where its tokens stand in the bundle."""
        found, start = [], self.prefix
        for piece in self.pieces:
            own = piece.rows.num_tokens - self.prefix
            found.append(np.concatenate([np.arange(self.prefix), np.arange(start, start + own)]))
            start += own
        return found


def share_prefixes(pieces: Sequence[SequencePart], *, max_tokens: int, world_size: int) -> list[Bundle]:
    """Return the pieces as bundles of at most `max_tokens`, rows with the same prompt together.

    Only single rows share, and what they share ends where the first of them samples its first token. A prompt with more than a rank's
    part of the tokens stands in as many bundles as it has parts, or some of the `world_size` ranks would wait for it.
    """
    by_prompt: dict[bytes, list[SequencePart]] = {}
    alone = []
    for piece in pieces:
        prompt = _prompt(piece.rows)
        if prompt is None:
            alone.append(Bundle((piece,)))
        else:
            by_prompt.setdefault(prompt.tobytes(), []).append(piece)
    whole = [_as_bundle(members, _prefix_length(members)) for members in by_prompt.values()]
    num_tokens = sum(b.num_tokens for b in (*alone, *whole))
    parts = [-(-world_size * b.num_tokens // num_tokens) for b in whole]
    return [*alone, *(b for bundle, least in zip(whole, parts, strict=True) for b in _fit(bundle.pieces, max_tokens, least))]


def _prefix_length(members: Sequence[SequencePart]) -> int:
    return int(members[0].rows.action_mask.argmax())


def _prompt(rows: Sample) -> NDArray[np.int32] | None:
    """Return the tokens of a single row before its first action; None of several rows, or of a row without actions."""
    if len(rows.segment_starts) > 1 or not rows.action_mask.any():
        return None
    return rows.token_ids[: int(rows.action_mask.argmax())]


def _fit(members: Sequence[SequencePart], max_tokens: int, least: int) -> list[Bundle]:
    """Cut rows of one prompt into as few bundles as fit, at least so many, with responses as even as can be."""
    prefix = _prefix_length(members)
    ordered = sorted(members, key=lambda p: -p.rows.num_tokens)
    responses = sum(p.rows.num_tokens - prefix for p in members)
    fewest = -(-responses // max(1, max_tokens - prefix))
    for count in range(max(least, fewest), len(members)):
        parts: list[list[SequencePart]] = [[] for _ in range(count)]
        for piece in ordered:
            min(parts, key=lambda part: sum(p.rows.num_tokens - prefix for p in part)).append(piece)
        bundles = [_as_bundle(part, prefix) for part in parts]
        if all(b.num_tokens <= max_tokens for b in bundles):
            return bundles
    return [_as_bundle([piece], prefix) for piece in members]


def _as_bundle(pieces: Sequence[SequencePart], prefix: int) -> Bundle:
    return Bundle(tuple(pieces), prefix if len(pieces) > 1 else 0)
