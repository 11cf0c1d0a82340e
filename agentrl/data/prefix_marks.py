"""Marks of token prefixes: they show which rows begin with the same tokens, without the tokens.

Packing is planned by lengths and marks alone. Rows with an equal mark begin with the same tokens.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Mark = tuple[int, str]
"""A number of tokens, and a hash of a segment's tokens up to there."""


def find_marks(
    token_ids: NDArray[np.int32], action_mask: NDArray[np.bool_], segment_starts: Sequence[int]
) -> tuple[tuple[Mark, ...], ...]:
    """Return the marks of each segment, ascending; their number does not depend on its length.

    A segment is marked where action tokens begin and where they end: there the attempts of a group part. It
    is also marked at the token where it parts from another segment of the same trajectory (a fork).
    """
    bounds = [*itertools.pairwise((*segment_starts, len(token_ids)))]
    rows = [np.ascontiguousarray(token_ids[start:end]) for start, end in bounds]
    places = [
        set(np.flatnonzero(np.diff(action_mask[start:end], prepend=False, append=False)).tolist())
        for start, end in bounds
    ]
    # In lexicographic order, no segment has more in common with another than with one of its neighbors.
    order = sorted(range(len(rows)), key=lambda i: rows[i].tobytes())
    for one, other in itertools.pairwise(order):
        common = _num_common(rows[one], rows[other])
        places[one].add(common)
        places[other].add(common)
    return tuple(_hashed(row, sorted(own - {0})) for row, own in zip(rows, places, strict=True))


def _num_common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    length = min(len(one), len(other))
    differing = one[:length] != other[:length]
    return int(differing.argmax()) if differing.any() else length


def _hashed(row: NDArray[np.int32], lengths: Sequence[int]) -> tuple[Mark, ...]:
    digest, found = hashlib.blake2b(digest_size=16), []
    for start, end in itertools.pairwise((0, *lengths)):
        digest.update(row[start:end].tobytes())
        found.append((end, digest.hexdigest()))
    return tuple(found)
