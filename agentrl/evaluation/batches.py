"""A stream in pieces."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def batches(items: Iterable[T], size: int) -> Iterator[tuple[T, ...]]:
    """Yield `size` items at a time, in their order; the last time what is left."""
    iterator = iter(items)
    while batch := tuple(itertools.islice(iterator, size)):
        yield batch
