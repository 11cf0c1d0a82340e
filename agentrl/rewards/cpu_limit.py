"""The last resort against an answer that costs too much: a limit of CPU for a block of Python."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TooCostlyError(ValueError):
    """Reading or comparing an answer would cost more than any answer is worth."""


class _OutOfTimeError(BaseException):
    """Raised into a computation: no `except Exception` of the algebra system may swallow it."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise TooCostlyError in the block once it took `seconds` of CPU; only in a main thread, where signals arrive.

    Answers are bounded before they are evaluated (`agentrl.rewards.bounds`): it is for what those bounds do not know.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _OutOfTimeError

    previous = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds / 4)  # again, in case that a `finally` swallowed the first
        yield
    except _OutOfTimeError:
        raise TooCostlyError(f"more than {seconds:g} s of CPU") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
