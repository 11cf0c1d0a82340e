"""Blocking work beside the event loop, in threads that never keep the process from ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Start `work` in a thread of its own, and return its result to come.

    Not the event loop's own threads: they are few, so that what hangs in them holds up all else, and the end of the process waits for
    them. Whoever calls this bounds how many there are.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            settle = partial(_settle, done, result=work())
        except Exception as error:  # noqa: BLE001  # boundary of a thread: carried to whoever waits
            settle = partial(_settle, done, error=error)
        try:
            loop.call_soon_threadsafe(settle)
        except RuntimeError:  # the loop has ended
            return

    threading.Thread(target=run, daemon=True).start()
    return done


def _settle(done: asyncio.Future[T], *, result: T | None = None, error: Exception | None = None) -> None:
    if done.done():  # cancelled: nobody waits any more
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(result)  # type: ignore[arg-type]  # None only where T has it
