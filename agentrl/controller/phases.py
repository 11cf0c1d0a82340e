"""What the controller does at this moment, for whoever watches it from another thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Phases:
    """`with phases("take"): ...` in the one thread that drives the run; phases do not nest."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now: tuple[str | None, float] = (None, clock())

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._now = (phase, self._clock())
        try:
            yield
        finally:
            self._now = (None, self._clock())

    @property
    def current(self) -> tuple[str | None, float]:
        """The phase, None between two of them, and the moment at which it began, or the last one ended."""
        return self._now
