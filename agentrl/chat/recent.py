"""Values derived from objects that are passed again and again, found by identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

NUM_KEPT = 8


class Recent(Generic[K, V]):
    """Keeps `derive(given)` for the last NUM_KEPT objects. They must not change.

    Thread-safe: two threads may derive the same value, which does no harm.
    """

    def __init__(self, derive: Callable[[K], V]) -> None:
        self._derive = derive
        self._kept: tuple[tuple[K, V], ...] = ()

    def get(self, given: K) -> V:
        for known, value in self._kept:
            if known is given:
                return value
        value = self._derive(given)
        self._kept = ((given, value), *self._kept[: NUM_KEPT - 1])
        return value
