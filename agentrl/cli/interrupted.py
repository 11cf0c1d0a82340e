"""Commands whose work is kept when they are interrupted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from agentrl.interrupts import (
    INTERRUPTED_STATUS,
    end_at_once,
    ending_at_the_second_interrupt,
    interruptible,
)


@contextmanager
def resumable() -> Iterator[None]:
    """On Ctrl-C or SIGTERM, at any moment, print that the run can be resumed and exit with 130."""
    with interruptible():
        try:
            with ending_at_the_second_interrupt():
                yield
        except KeyboardInterrupt:
            sys.stdout.flush()
            # All is closed. What Python would do yet can crash in Ray's destructors, or be interrupted.
            end_at_once(
                "interrupted; everything saved so far is kept, and the same command resumes",
                status=INTERRUPTED_STATUS,
            )
