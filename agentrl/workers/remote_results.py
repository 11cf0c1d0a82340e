"""Results that stay on the ranks that computed them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypeVar, overload

import ray
from ray import ObjectRef

T = TypeVar("T")

FETCH_TIMEOUT_S = 600.0
"""For a result that is ready on another machine: transferring a large batch may take long, but must end."""


class RemoteResults(Sequence[T]):
    """Items that stay on the ranks that computed them.

    A group passes the references on unread. Reading one item fetches all of them.
    """

    def __init__(self, parts: Sequence[ObjectRef], sizes: Sequence[int]) -> None:
        self.parts = tuple(parts)
        self.sizes = tuple(sizes)

    def __len__(self) -> int:
        return sum(self.sizes)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        return list(self)[index]

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(ray.get(list(self.parts), timeout=FETCH_TIMEOUT_S))
