"""Blocking work off the event loop, in daemon threads that do not delay process exit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Start `work` in a new daemon thread and return a future of its result.

    The event loop's default executor is not used. It has few threads, so a hanging call would block all
    others, and the interpreter joins them at exit. The callers bound the number of threads.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            settle = partial(_settle, done, result=work())
        except Exception as error:  # noqa: BLE001  # boundary of a thread: raised from the future instead
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
