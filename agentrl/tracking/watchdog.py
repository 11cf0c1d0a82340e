"""`Watchdog`: reports, from its own thread, what a run or an evaluation without progress waits for.

The first report comes after `silence_s` without progress, and another each time the silence has doubled.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

ANSWER_S = 5.0
"""Timeout of an answer: a part that takes longer is stuck, or its machine is."""
LONGEST_PAUSE_S = 5.0
LOOKS_PER_SILENCE = 8
SLICE_S = 0.2
"""Poll interval of waits for answers, and so the delay until they notice `stopping`."""
KEPT_SCOPES = 200
"""Attempts per process that the written report shows in full."""
SHOWN_SCOPES = 8
"""Attempts per process that the console shows in full."""

log = logging.getLogger(__name__)


class Playing(Protocol):
    """What a process that plays attempts waits for: `agentrl.rollout.scopes.LiveScopes`."""

    def lines(self) -> Iterator[str]: ...

    def shortened(self, limit: int) -> Playing:
        """Return a copy with at most `limit` attempts in full."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Why a run or an evaluation makes no progress.

    facts: lines about everything that plays no attempts.
    playing: for each process that plays, by its title, what it waits for; or a line that says why that is
    unknown.
    """

    facts: Sequence[str]
    playing: Mapping[str, Playing | str]

    def lines(self, *, max_scopes: int | None = None) -> Iterator[str]:
        """Yield the findings as lines of text.

        max_scopes: number of attempts per process that are shown in full; None: all, and trio's task tree.
        """
        yield from self.facts
        for title, found in self.playing.items():
            if isinstance(found, str):
                yield found
            else:
                yield f"{title}:"
                yield from (
                    f"  {line}"
                    for line in (found if max_scopes is None else found.shortened(max_scopes)).lines()
                )


class Watched(Protocol):
    """The watched run. The watchdog's thread calls all methods; they return soon after `stopping` is set."""

    key: str
    """Config key of the silence limit, for messages."""
    progress: str
    """What counts as progress, for messages, such as "trajectory, batch or update"."""
    stopping: threading.Event

    def measure_silence(self, limit_s: float) -> float:
        """Return the seconds since the last progress; values below half of `limit_s` need not be exact."""

    def find(self) -> Findings:
        """Ask all parts what they wait for."""


class Watchdog:
    """Context manager that watches within its block.

    It never raises, and leaving it takes seconds at most.
    """

    def __init__(
        self, watched: Watched, *, silence_s: float, folder: Path, say: Callable[[str], None]
    ) -> None:
        """silence_s: report after this many seconds without progress. folder: for the full reports.

        `say` shows them shortened.
        """
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

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(2 * ANSWER_S)

    def _watch(self) -> None:
        while not self._stopping.wait(min(LONGEST_PAUSE_S, self._silence_s / LOOKS_PER_SILENCE)):
            try:
                self._look()
            except Exception:  # boundary: an error of the watchdog must not affect the run
                if not self._has_failed:  # the next poll would fail the same way
                    log.warning("the watchdog could not poll (%s)", self._watched.key, exc_info=True)
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
        self._say(
            "\n".join(
                [head, *(f"  {line}" for line in findings.lines(max_scopes=SHOWN_SCOPES)), f"  {where}"]
            )
        )

    def _write(self, text: str) -> str:
        """Write a report, and return a line with its path."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            number = 1 + max(
                (int(file.stem) for file in self._folder.glob("*.txt") if file.stem.isdecimal()), default=0
            )
            file = self._folder / f"{number:03d}.txt"
            file.write_text(text, encoding="utf-8")
        except OSError as error:  # a full disk may be what the run waits for
            return f"this report could not be written to {self._folder}: {error.strerror}"
        return f"full report: {file}"
