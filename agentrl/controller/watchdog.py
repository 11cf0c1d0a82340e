"""Says what a run waits for that makes no progress: a thread of the driver, so that it speaks also while the driver waits itself.

Progress is a trajectory that reached the buffer, an attempt that ended (of a validation, too), and the begin or end of a phase: a batch
taken, an update, a publish, a checkpoint. After `trainer.watchdog_s` without any there is one report, and another each time that the
silence has lasted twice as long.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from agentrl.controller.findings import Asker, Watched, find, look_at_progress

if TYPE_CHECKING:
    from agentrl.controller.run import Run

ANSWER_S = 5.0
"""Whoever takes longer to say how it is stands still, or its machine does."""
LONGEST_PAUSE_S = 5.0
LOOKS_PER_SILENCE = 8
SHOWN_SCOPES = 8
"""Attempts of an actor that the console shows in full; the file has more."""

log = logging.getLogger(__name__)


class Watchdog:
    """A context manager: it watches while it lasts. It never raises, and its end takes seconds whatever hangs."""

    def __init__(self, watched: Watched, *, silence_s: float, folder: Path, say: Callable[[str], None], answer_s: float = ANSWER_S) -> None:
        """`silence_s`: after so long without progress it speaks. folder: where reports are written; `say` shows them shortened."""
        self._watched = watched
        self._silence_s = silence_s
        self._folder = folder
        self._say = say
        self._answer_s = answer_s
        self._stopping = threading.Event()
        self._asker = Asker(answer_s=answer_s, stopping=self._stopping)
        self._last_progress = -math.inf
        self._num_finished: float | None = None
        self._next_report_s = silence_s
        self._has_failed = False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopping.set()
        self._thread.join(2 * self._answer_s)

    def _watch(self) -> None:
        while not self._stopping.wait(min(LONGEST_PAUSE_S, self._silence_s / LOOKS_PER_SILENCE)):
            try:
                self._look()
            except Exception:  # boundary: whatever is wrong with the watchdog, the run goes on
                if not self._has_failed:  # the next look will fail as this one did
                    log.warning("the watchdog could not look at the run", exc_info=True)
                self._has_failed = True

    def _look(self) -> None:
        silent_s = self._measure_silence()
        if silent_s < self._silence_s:
            self._next_report_s = self._silence_s
        elif silent_s >= self._next_report_s and not self._stopping.is_set():
            self._next_report_s = 2 * silent_s
            self._report(silent_s)

    def _measure_silence(self) -> float:
        """Return the seconds since the last progress; others are asked only when the controller has been silent for half of the limit."""
        _, since = self._watched.phases.current
        silent_s = time.monotonic() - max(since, self._last_progress)
        if silent_s < self._silence_s / 2:
            return silent_s
        progress = look_at_progress(self._watched, self._asker)
        if progress.num_finished is not None:
            if self._num_finished is not None and progress.num_finished > self._num_finished:
                self._last_progress = time.monotonic()
            self._num_finished = progress.num_finished
        silent_s = time.monotonic() - max(since, self._last_progress)
        return silent_s if progress.since_add_s is None else min(silent_s, progress.since_add_s)

    def _report(self, silent_s: float) -> None:
        head = f"no progress for {silent_s:.0f} s (trainer.watchdog_s={self._silence_s:g}): no trajectory, batch, update or publish"
        findings = find(self._watched, self._asker)
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


def watching(run: Run) -> AbstractContextManager[object]:
    """Watch a run that is up, from the thread that drives it; by its config, maybe not at all."""
    silence_s = run.config.trainer.watchdog_s
    if silence_s is None:
        return nullcontext()
    watched = Watched(run.buffer.actor, run.servers, run.rollouts, lambda: [*run.roles.ranks], run.phases, threading.current_thread())
    return Watchdog(watched, silence_s=silence_s, folder=run.dir.root / "watchdog", say=run.observer.say)
