"""A set of integers that mostly follow each other, such as the ids of all groups that have ended."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence


class IdRanges:
    """Kept as ranges: the ids of millions of groups that ended nearly in order are a few numbers."""

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        """`ranges`: (first, last) pairs, ascending, as `ranges` returns them."""
        self._ranges = [(first, last) for first, last in ranges]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return list(self._ranges)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._ranges, number, key=lambda range_: range_[0]) - 1
        return at >= 0 and number <= self._ranges[at][1]

    def add(self, numbers: Iterable[int]) -> None:
        merged: list[tuple[int, int]] = []
        for first, last in sorted([*self._ranges, *((number, number) for number in numbers)]):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(merged[-1][1], last))
            else:
                merged.append((first, last))
        self._ranges = merged
