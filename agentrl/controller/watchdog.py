"""The watchdog of a training run: how it measures progress, and what it asks when there is none.

Progress is a trajectory that reached the buffer, an attempt that ended (of a validation, too), or the begin
or end of a phase: a batch, an update, a publish, a checkpoint. See agentrl.tracking.watchdog.
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from agentrl.controller.findings import Asker, Parts, RunFindings, find, look_at_progress
from agentrl.tracking.watchdog import ANSWER_S, Watchdog

if TYPE_CHECKING:
    from agentrl.controller.run import Run


class WatchedRun:
    """A running run, as its watchdog sees it. `answer_s`: timeout of each part's answer."""

    key = "trainer.watchdog_s"
    progress = "trajectory, batch, update or publish"

    def __init__(self, parts: Parts, *, answer_s: float = ANSWER_S) -> None:
        self.stopping = threading.Event()
        self._parts = parts
        self._asker = Asker(answer_s=answer_s, stopping=self.stopping)
        self._last_progress = -math.inf
        self._num_finished: float | None = None

    def measure_silence(self, limit_s: float) -> float:
        """Return the seconds since the last progress.

        Buffer and actors are asked only after the controller has been silent for half of the limit.
        """
        _, since = self._parts.phases.current
        silent_s = time.monotonic() - max(since, self._last_progress)
        if silent_s < limit_s / 2:
            return silent_s
        progress = look_at_progress(self._parts, self._asker)
        if progress.num_finished is not None:
            if self._num_finished is not None and progress.num_finished > self._num_finished:
                self._last_progress = time.monotonic()
            self._num_finished = progress.num_finished
        silent_s = time.monotonic() - max(since, self._last_progress)
        return silent_s if progress.since_add_s is None else min(silent_s, progress.since_add_s)

    def find(self) -> RunFindings:
        return find(self._parts, self._asker)


def watching(run: Run) -> AbstractContextManager[object]:
    """Return the watchdog of a running run; it does nothing if `trainer.watchdog_s` is None.

    Call it in the driver's thread, whose stack the reports show.
    """
    silence_s = run.config.trainer.watchdog_s
    if silence_s is None:
        return nullcontext()
    parts = Parts(run.buffer, run.servers, run.rollouts, lambda: [*run.roles.ranks], run.phases, threading.current_thread())
    return Watchdog(WatchedRun(parts), silence_s=silence_s, folder=run.dir.root / "watchdog", say=run.observer.say)
