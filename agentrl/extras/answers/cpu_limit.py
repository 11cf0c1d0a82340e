"""A CPU time limit for a block of Python: the last resort against costly answers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TooCostlyError(ValueError):
    """Parsing or comparing an answer would take too long."""


class _OutOfTimeError(BaseException):
    """Raised into a computation. A BaseException, so that no `except Exception` of sympy swallows it."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise TooCostlyError in the block after `seconds` of CPU time. Only in the main thread, which receives
    signals.

    Answers are bounded before they are evaluated (`agentrl.extras.answers.bounds`). This limit covers what
    the bounds miss.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _OutOfTimeError

    previous = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        # Repeated, in case a `finally` swallows the first.
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds / 4)
        yield
    except _OutOfTimeError:
        raise TooCostlyError(f"more than {seconds:g} s of CPU") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
