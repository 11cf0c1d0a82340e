"""`PhaseTimer`: measures the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Adds up the seconds of named phases: `with timer("update"): ...`. For one thread; phases do not nest.

    `on_phase` is called with the name of a phase when it begins, and with None when it ends.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, on_phase: Callable[[str | None], None] | None = None) -> None:
        self._clock = clock
        self._on_phase = on_phase
        self._seconds: dict[str, float] = {}
        self._running: str | None = None
        self._step_start = clock()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time one phase, also if it raises."""
        assert self._running is None, f"phase {phase!r} inside of {self._running!r}: seconds would be counted twice"
        self._enter(phase)
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self._clock() - start
            self._enter(None)

    def finish_step(self) -> dict[str, float]:
        """Return the step's times and start the next step.

        Returns:
            `time/<phase>_s` and `time/step_s`: seconds; a step lasts from one call to the next;
            `time/share/<phase>`: share of the step, in [0, 1]; absent for a step of no duration.
        """
        now = self._clock()
        step_s = now - self._step_start
        values = {f"time/{phase}_s": seconds for phase, seconds in self._seconds.items()}
        if step_s > 0:
            values |= {f"time/share/{phase}": seconds / step_s for phase, seconds in self._seconds.items()}
        self._seconds = {}
        self._step_start = now
        return {**values, "time/step_s": step_s}

    def _enter(self, phase: str | None) -> None:
        self._running = phase
        if self._on_phase is not None:
            self._on_phase(phase)
