"""Split a stream into batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def batches(items: Iterable[T], size: int) -> Iterator[tuple[T, ...]]:
    """Yield `size` items at a time, in order; the last batch may be smaller."""
    iterator = iter(items)
    while batch := tuple(itertools.islice(iterator, size)):
        yield batch
