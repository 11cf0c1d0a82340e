"""`StartUp`: progress of a run's start as a table: which parts are ready, which are not, and for how long.

servers 1/2 (12 s), learner 0/2 (12 s), rollout actors 1/1, replay buffer 1/1
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from agentrl.cluster.starting import Starting
from agentrl.servers.startup import Readiness

SAY_INTERVAL_S = 5.0
MAX_SAY_INTERVAL_S = 30.0
"""The interval between reports doubles up to this limit."""
JOIN_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


class _Step:
    """A part of the start-up that the driver itself does, as a line of the table."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.is_done = False

    @property
    def readiness(self) -> Readiness:
        return Readiness(self._name, int(self.is_done), 1)


def _pending(ready: Readiness, age_s: float) -> str:
    return f" ({age_s:.0f} s{f'; {ready.waits_for}' if ready.waits_for else ''})"


class StartUp:
    """Context manager that reports the table every few seconds from its own thread, while the driver waits.

    `_parts` is replaced or appended to by the driver and copied by the thread, so it needs no lock.
    """

    def __init__(self, say: Callable[[str], None], *, interval_s: float = SAY_INTERVAL_S) -> None:
        self._say = say
        self._interval_s = interval_s
        self._parts: list[tuple[Starting | _Step, float]] = []  # each with its launch time (monotonic clock)
        self._took_s: dict[str, float] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="start-up", daemon=True)

    def __enter__(self) -> StartUp:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def finish(self, file: Path) -> None:
        """Stop reporting, and write the table with the seconds until each part was seen ready."""
        self._end()
        rows = [
            f"{ready.name:<16}{f'{ready.num_ready}/{ready.num_parts}':>8}{age_s:>10.1f} s\n"
            for ready, age_s in self._rows()
        ]
        file.write_text("".join(rows), encoding="utf-8")

    def add(self, *parts: Starting) -> None:
        """Add parts that were just launched."""
        self._parts += [(part, time.monotonic()) for part in parts]

    def remove(self, *parts: Starting) -> None:
        """Remove parts that are about to be replaced."""
        self._parts = [(part, since) for part, since in self._parts if part not in parts]

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Add a line that becomes ready when the block ends."""
        step = _Step(name)
        self._parts.append((step, time.monotonic()))
        yield
        step.is_done = True

    def line(self) -> str:
        """Return the table in one line; only parts that are not ready show their age."""
        return ", ".join(
            f"{ready.name} {ready.num_ready}/{ready.num_parts}"
            + ("" if ready.is_ready else _pending(ready, age_s))
            for ready, age_s in self._rows()
        )

    def _end(self) -> None:
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)

    def _rows(self) -> list[tuple[Readiness, float]]:
        """Return each part with its age in seconds; the age stops when the part is first seen ready."""
        rows = []
        for part, since in list(self._parts):
            ready, age_s = part.readiness, time.monotonic() - since
            if ready.is_ready:
                age_s = self._took_s.setdefault(ready.name, age_s)
            rows.append((ready, age_s))
        return rows

    def _watch(self) -> None:
        try:
            interval_s = self._interval_s
            while not self._is_over.wait(interval_s):
                if any(not ready.is_ready for ready, _ in self._rows()):
                    self._say(f"starting: {self.line()}")
                    interval_s = min(2 * interval_s, MAX_SAY_INTERVAL_S)
        except Exception:  # boundary: an error in the report must not end the start-up
            log.warning("the progress of the start-up is no longer reported", exc_info=True)
