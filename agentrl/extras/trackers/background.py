"""A tracker whose calls return at once: a thread of its own makes them, in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from agentrl.tracking.alarms import Alarm
from agentrl.tracking.attempt_table import SampledAttempts
from agentrl.tracking.metrics import StepRecord

if TYPE_CHECKING:
    from agentrl.tracking.tracker import Tracker

MAX_WAITING = 1_000
"""Calls that may wait while a service is slow. A run makes a few per step."""
CLOSE_TIMEOUT_S = 60.0

_Call = Callable[[], None]


class BackgroundTracker:
    """Wraps a tracker that talks to a service: a step never waits for it.

    An error of the tracker, or a full queue, is raised by the next call; nothing is sent after it.
    """

    def __init__(
        self, inner: Tracker, *, max_waiting: int = MAX_WAITING, close_timeout_s: float = CLOSE_TIMEOUT_S
    ) -> None:
        self._inner = inner
        self._close_timeout_s = close_timeout_s
        self._calls: queue.Queue[_Call | None] = queue.Queue(max_waiting)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self._thread.start()

    def log(self, record: StepRecord) -> None:
        self._later(lambda: self._inner.log(record))

    def log_alarm(self, alarm: Alarm) -> None:
        self._later(lambda: self._inner.log_alarm(alarm))

    def log_attempts(self, table: SampledAttempts) -> None:
        self._later(lambda: self._inner.log_attempts(table))

    def close(self) -> None:
        """Wait until everything is sent, and close the tracker.

        Raises:
            TimeoutError: the service did not take everything in time.
            Exception: what the tracker raised.
        """
        self._later(self._inner.close)
        self._later(None)
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"the service did not take the last {self._calls.qsize()} records within "
                f"{self._close_timeout_s:g} s"
            )
        self._raise_failure()

    def _later(self, call: _Call | None) -> None:
        self._raise_failure()
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise TimeoutError(f"the service is {self._calls.qsize()} records behind") from None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:  # noqa: BLE001 - boundary: a third party's client may raise anything
                self._failure = error
                return
