"""`Phases`: the controller's current phase, readable from other threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Phases:
    """`with phases("take"): ...` in the driver's thread; phases do not nest.

    `_now` is one tuple, replaced as a whole, so that readers need no lock.
    """

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
        """The current phase and its start (by `clock`); between phases None and the end of the last one."""
        return self._now
