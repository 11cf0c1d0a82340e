"""Bundles: pieces of samples that are packed together, because their rows share a prefix."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agentrl.fast_pickle import pickled_fast
from agentrl.learner.prefix_tree import KEYS_PER_TOKEN, PrefixTree, Segmentation


@pickled_fast
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
    first_row: row of its first segment in the `PrefixTree` of the samples.
    """

    sample: int
    segment: int | None
    lengths: tuple[int, ...]
    num_actions: int
    first_place: int
    is_split: bool
    is_counted: bool
    loss_length: int
    first_row: int

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def rows(self) -> range:
        return range(self.first_row, self.first_row + len(self.lengths))


@pickled_fast
@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """A unit of packing: pieces with the segments of their rows, in the order of pieces."""

    pieces: tuple[PackedPiece, ...]
    segmentation: Segmentation

    @classmethod
    def of(cls, pieces: Iterable[PackedPiece], tree: PrefixTree) -> Bundle:
        members = tuple(pieces)
        return cls(members, tree.segments([row for piece in members for row in piece.rows]))

    @property
    def num_tokens(self) -> int:
        return self.segmentation.num_tokens

    @property
    def size(self) -> int:
        return self.segmentation.size

    def places(self) -> Iterator[NDArray[np.int64]]:
        """Yield i64[T] per piece, the positions of its tokens in the bundle."""
        of_rows = self.segmentation.places()
        for piece in self.pieces:
            yield np.concatenate([next(of_rows) for _ in piece.rows])


def bundle_pieces(
    pieces: Sequence[PackedPiece], tree: PrefixTree, *, max_tokens: int, world_size: int
) -> list[Bundle]:
    """Bundle the pieces whose rows share nodes of the tree, at most `max_tokens` per bundle.

    If a bundle holds more than one rank's share of all tokens, it is cut into as many bundles as it has
    shares; otherwise some of the `world_size` ranks would wait for it.
    """
    whole = [Bundle.of(members, tree) for members in _related(pieces, tree)]
    num_tokens = sum(one.num_tokens for one in whole)
    return [
        part
        for one in whole
        for part in _fit(one, tree, max_tokens, least=-(-world_size * one.num_tokens // num_tokens))
    ]


def _related(pieces: Sequence[PackedPiece], tree: PrefixTree) -> list[list[PackedPiece]]:
    """Return the pieces by what they share, directly or through other pieces."""
    joined_to: dict[int, int] = {}

    def home(root: int) -> int:
        while (other := joined_to.setdefault(root, root)) != root:
            root = other
        return root

    roots = [[tree.path(row)[-1] for row in piece.rows] for piece in pieces]
    for first, *others in roots:
        for other in others:
            joined_to[home(other)] = home(first)
    by_home: dict[int, list[PackedPiece]] = defaultdict(list)
    for piece, (first, *_) in zip(pieces, roots, strict=True):
        by_home[home(first)].append(piece)
    return list(by_home.values())


@dataclass(slots=True)
class _Part:
    """A bundle to be: its pieces, and the nodes of their rows."""

    pieces: list[PackedPiece] = field(default_factory=list)
    nodes: set[int] = field(default_factory=set)
    num_tokens: int = 0
    num_keys: int = 0

    @property
    def size(self) -> int:
        return max(self.num_tokens, -(-self.num_keys // KEYS_PER_TOKEN))


def _fit(whole: Bundle, tree: PrefixTree, max_tokens: int, least: int) -> list[Bundle]:
    """Distribute the pieces over as few bundles as fit, at least `least`, with balanced tokens."""
    if least == 1 and whole.size <= max_tokens:
        return [whole]
    ordered = sorted(whole.pieces, key=lambda p: -p.num_tokens)
    count = max(least, -(-whole.size // max_tokens))
    while count < len(ordered):
        parts = _distribute(ordered, tree, count)
        if all(part.size <= max_tokens for part in parts):
            return [Bundle.of(part.pieces, tree) for part in parts if part.pieces]
        count = max(count + 1, int(count * 1.1))
    return [Bundle.of([piece], tree) for piece in whole.pieces]


def _distribute(pieces: Sequence[PackedPiece], tree: PrefixTree, count: int) -> list[_Part]:
    """Give each piece to the part that is smallest with it."""
    parts = [_Part() for _ in range(count)]
    for piece in pieces:
        own = {node: tree.own_tokens(node) for row in piece.rows for node in tree.path(row)}
        tokens = [
            part.num_tokens + sum(tokens for node, tokens in own.items() if node not in part.nodes)
            for part in parts
        ]
        part = parts[tokens.index(min(tokens))]
        part.num_tokens = min(tokens)
        part.num_keys += sum(int(tree.depths[node]) for node in own if node not in part.nodes)
        part.pieces.append(piece)
        part.nodes |= own.keys()
    return parts
