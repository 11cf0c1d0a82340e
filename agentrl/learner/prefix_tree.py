"""The tree of what rows begin with: tokens that several rows share are one node, and computed once.

A row is one segment of a sample, tokens t_1 .. t_n. Two rows share a token if it and all tokens before it are
equal. The tree is grown from marks (`agentrl.data.prefix_marks`), so no token is needed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.data.prefix_marks import Mark
from agentrl.fast_pickle import pickled_fast

KEYS_PER_TOKEN = 4
"""Keys that a microbatch may have per token of its limit.

A node's keys are those of its row from the first token on, and attention copies them for each node. In a
model whose keys and values are as wide as its hidden states, this many cost about half as much memory as the
rest.
"""


def prefix_lengths(lengths: NDArray[np.int64], prefix_segments: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return i64[G], the tokens before each segment in the row that it continues; arguments: `Microbatch`."""
    found = np.zeros(len(lengths), np.int64)
    for segment, continued in enumerate(prefix_segments):  # a segment is behind the one that it continues
        if continued >= 0:
            found[segment] = found[continued] + lengths[continued]
    return found


def segment_costs(
    lengths: NDArray[np.int64], prefixes: NDArray[np.int64], parity_tokens: float
) -> NDArray[np.float64]:
    """Return f64[G], the cost of each segment, in units of one token through the linear layers.

    Attention grows with the square of the length: for a segment of `parity_tokens` it costs as much as all
    linear layers (see `attention_parity`). With a causal mask a token attends to half of its own segment on
    average. Behind a prefix (of so many tokens) the mask is a rectangle, and all pairs in it are computed.
    """
    masked = np.where(prefixes > 0, lengths + 2 * prefixes, 0)
    return lengths + lengths * (lengths + masked) / parity_tokens


@pickled_fast
@dataclass(frozen=True, slots=True, eq=False)
class Segmentation:
    """The segments of some rows of a tree, each behind the one that it continues.

    lengths: i64[G]. prefix_segments: i64[G], see `Microbatch`.
    paths: of each row, the segments that it consists of, from its first token on.
    """

    lengths: NDArray[np.int64]
    prefix_segments: NDArray[np.int64]
    paths: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def size(self) -> int:
        """Tokens that it takes of a microbatch's limit (see `KEYS_PER_TOKEN`)."""
        keys = int((self.lengths + prefix_lengths(self.lengths, self.prefix_segments)).sum())
        return max(self.num_tokens, -(-keys // KEYS_PER_TOKEN))

    def places(self) -> Iterator[NDArray[np.int64]]:
        """Yield i64[n] per row, the positions of its tokens if the segments are concatenated."""
        ends = np.cumsum(self.lengths)
        for path in self.paths:
            yield np.concatenate([np.arange(ends[s] - self.lengths[s], ends[s]) for s in path])


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTree:
    """Nodes 0 .. R - 1 are the ends of the R rows; a later node is where several earlier ones part.

    depths: i64[N], tokens from the first one to the node. above: i64[N], the node that each one continues;
    -1: none. A node is before the one that it continues.
    """

    num_rows: int
    depths: NDArray[np.int64]
    above: NDArray[np.int64]

    @classmethod
    def grow(cls, lengths: Sequence[int], marks: Iterable[Sequence[Mark]]) -> PrefixTree:
        """Return the tree of rows of these lengths and marks."""
        rows_of: dict[Mark, list[int]] = defaultdict(list)
        for row, own in enumerate(marks):
            for mark in own:
                rows_of[mark].append(row)
        depths, above = list(lengths), [-1] * len(lengths)
        top = list(range(len(lengths)))  # of each row: the last node above it so far
        rows_below = {row: [row] for row in top}
        # The deepest first: rows that share more are one node already where they share less with others.
        for (depth, _), rows in sorted(rows_of.items(), key=lambda item: -item[0][0]):
            parting = dict.fromkeys(top[row] for row in rows)
            if len(parting) < 2:
                continue
            node = len(depths)
            depths.append(depth)
            above.append(-1)
            rows_below[node] = [row for child in parting for row in rows_below.pop(child)]
            for child in parting:
                above[child] = node
            for row in rows_below[node]:
                top[row] = node
        return cls(len(lengths), np.array(depths, np.int64), np.array(above, np.int64))

    def worthwhile(self, parity_tokens: float) -> PrefixTree:
        """Return the tree with only those roots that cost less than computing their tokens for each row.

        Nodes below a root that is left out are roots themselves, and are judged likewise. A node below a root
        that remains is always kept: its rows have a mask anyway.
        """
        prefixes = np.where(self.above >= 0, self.depths[self.above], 0)
        inner = segment_costs(self.depths - prefixes, prefixes, parity_tokens)
        alone = segment_costs(self.depths, np.zeros_like(prefixes), parity_tokens)
        kept_below, best_below = np.zeros((2, len(self.depths)))
        is_worth = np.ones(len(self.depths), np.bool_)  # as a root
        for node, continued in enumerate(self.above):
            kept, parted = alone[node] + kept_below[node], best_below[node]
            is_worth[node] = node < self.num_rows or kept < parted
            if continued >= 0:
                kept_below[continued] += inner[node] + kept_below[node]
                best_below[continued] += min(kept, parted) if node >= self.num_rows else kept
        above = self.above.copy()
        is_root = above < 0
        for node in range(len(above) - 1, -1, -1):
            if above[node] >= 0 and is_root[above[node]] and not is_worth[above[node]]:
                above[node], is_root[node] = -1, True
        return PrefixTree(self.num_rows, self.depths, above)

    def path(self, row: int) -> list[int]:
        """Return the nodes of a row, from its end to the root."""
        found = [row]
        while (node := int(self.above[found[-1]])) >= 0:
            found.append(node)
        return found

    def own_tokens(self, node: int) -> int:
        """Return the tokens of a node: those behind the node that it continues."""
        above = self.above[node]
        return int(self.depths[node] - (self.depths[above] if above >= 0 else 0))

    def segments(self, rows: Sequence[int]) -> Segmentation:
        """Return the segments of these rows alone: where only one of them passes a node, it is no segment."""
        paths = [self.path(row) for row in rows]
        num_children = Counter(
            self.above[node] for node in {node for path in paths for node in path} if self.above[node] >= 0
        )
        number: dict[int, int] = {}
        lengths: list[int] = []
        continued: list[int] = []
        found = []
        for row, path in zip(rows, paths, strict=True):
            own: list[int] = []
            depth = 0
            for node in reversed(path):
                # Two rows may end at one node, or one where others go on: such an end has no tokens.
                if self.depths[node] == depth or (node != row and num_children[node] == 1):
                    continue
                if node not in number:
                    number[node] = len(lengths)
                    lengths.append(int(self.depths[node]) - depth)
                    continued.append(own[-1] if own else -1)
                own.append(number[node])
                depth = int(self.depths[node])
            found.append(tuple(own))
        return Segmentation(np.array(lengths, np.int64), np.array(continued, np.int64), tuple(found))
