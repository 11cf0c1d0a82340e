"""Signals that end a command: the first closes everything in order, a second one ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

INTERRUPTED_STATUS = 130
SAME_INTERRUPT_S = 1.0
"""Interrupts within this time count as one: launchers forward a Ctrl-C that also reached this process."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interruptible() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt in the main thread, as Ctrl-C does, so that everything is closed.

    After the first interrupt, `ending_at_the_second_interrupt` handles the next. The outermost block restores
    the handlers.
    """
    is_outermost = signal.getsignal(signal.SIGTERM) is not _interrupt
    if threading.current_thread() is not threading.main_thread() or not is_outermost:
        yield
        return
    previous = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def ending_at_the_second_interrupt() -> Iterator[None]:
    """Exit this process at once on a second interrupt, while the first one is still closing everything.

    Ray's processes, and with them servers and ranks, end by themselves when this process is gone.
    """
    try:
        yield
    except KeyboardInterrupt:
        if threading.current_thread() is threading.main_thread():
            interrupted = time.monotonic()

            def heed(_signal: int, _frame: FrameType | None) -> None:
                if time.monotonic() - interrupted > SAME_INTERRUPT_S:
                    end_at_once(
                        "interrupted twice: ended at once; the newest whole checkpoint is untouched, the "
                        "same command resumes",
                        status=INTERRUPTED_STATUS,
                    )

            for number in SIGNALS:
                signal.signal(number, heed)
        raise


def end_at_once(line: str, *, status: int) -> NoReturn:
    """Write a line to standard error and end this process, without closing anything."""
    show_cursor = "\x1b[?25h" if os.isatty(1) else ""  # a display may have hidden it
    with suppress(OSError):
        os.write(2, f"{show_cursor}{line}\n".encode())
    os._exit(status)
