"""Says what a run or an evaluation waits for that makes no progress, from a thread of its own: it speaks also while the others wait.

After so many seconds without progress there is one report, and another each time that the silence has lasted twice as long.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Protocol

ANSWER_S = 5.0
"""Whoever takes longer to say how it is stands still, or its machine does."""
LONGEST_PAUSE_S = 5.0
LOOKS_PER_SILENCE = 8
SLICE_S = 0.2
"""How soon whoever asks lets go when the watchdog is told to stop."""
KEPT_SCOPES = 200
"""Attempts of a process that a report has in full."""
SHOWN_SCOPES = 8
"""Attempts of a process that the console shows in full."""

log = logging.getLogger(__name__)


class Findings(Protocol):
    """What each part said of itself."""

    def lines(self, *, max_scopes: int | None = None) -> Iterator[str]:
        """Yield them as text; max_scopes: attempts of each process in full, None: all, and the tree of tasks with them."""


class Watched(Protocol):
    """What makes progress, or does not. All methods are called from the thread of the watchdog, and end soon once `stopping` is set."""

    key: str
    """Of the config, that says how long it may be silent."""
    progress: str
    """What is missing while there is none, such as "trajectory, batch or update"."""
    stopping: threading.Event

    def measure_silence(self, limit_s: float) -> float:
        """Return the seconds since the last progress; below half of `limit_s` they need not be exact."""

    def find(self) -> Findings:
        """Ask every part what it waits for."""


class Watchdog:
    """A context manager: it watches while it lasts. It never raises, and its end takes seconds whatever hangs."""

    def __init__(self, watched: Watched, *, silence_s: float, folder: Path, say: Callable[[str], None]) -> None:
        """`silence_s`: after so long without progress it speaks. folder: where reports are written; `say` shows them shortened."""
        self._watched = watched
        self._silence_s = silence_s
        self._folder = folder
        self._say = say
        self._stopping = watched.stopping
        self._next_report_s = silence_s
        self._has_failed = False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopping.set()
        self._thread.join(2 * ANSWER_S)

    def _watch(self) -> None:
        while not self._stopping.wait(min(LONGEST_PAUSE_S, self._silence_s / LOOKS_PER_SILENCE)):
            try:
                self._look()
            except Exception:  # boundary: whatever is wrong with the watchdog, the run goes on
                if not self._has_failed:  # the next look will fail as this one did
                    log.warning("the watchdog could not look (%s)", self._watched.key, exc_info=True)
                self._has_failed = True

    def _look(self) -> None:
        silent_s = self._watched.measure_silence(self._silence_s)
        if silent_s < self._silence_s:
            self._next_report_s = self._silence_s
        elif silent_s >= self._next_report_s and not self._stopping.is_set():
            self._next_report_s = 2 * silent_s
            self._report(silent_s)

    def _report(self, silent_s: float) -> None:
        watched = self._watched
        head = f"no progress for {silent_s:.0f} s ({watched.key}={self._silence_s:g}): no {watched.progress}"
        findings = watched.find()
        if self._stopping.is_set():
            return
        where = self._write("\n".join([head, *findings.lines(), ""]))
        self._say("\n".join([head, *(f"  {line}" for line in findings.lines(max_scopes=SHOWN_SCOPES)), f"  {where}"]))

    def _write(self, text: str) -> str:
        """Write a report, and return the line that says where it is."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            number = 1 + max((int(file.stem) for file in self._folder.glob("*.txt") if file.stem.isdecimal()), default=0)
            file = self._folder / f"{number:03d}.txt"
            file.write_text(text, encoding="utf-8")
        except OSError as error:  # a full disk may be what the run waits for
            return f"this report could not be written to {self._folder}: {error.strerror}"
        return f"all of it: {file}"
