"""The wall around a plugin's code: nothing that it raises ends more than its own attempt.

Python keeps SystemExit, KeyboardInterrupt and what derives from BaseException (a panic of a library in Rust) out of reach of
`except Exception`, for they are meant for the whole program. A plugin does not speak for the program. What is: cancellation, and a
signal that arrives while the plugin runs.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

SIGNAL_HANDLERS = ("trio.", "agentrl.controller.cluster")
"""Modules whose functions raise KeyboardInterrupt for a signal."""


class PluginQuit(RuntimeError):
    """A plugin raised what is meant to end a program or a task; the text says what, the cause is the exception itself."""


@contextmanager
def contained(*cancellation: type[BaseException]) -> Iterator[None]:
    """Raise PluginQuit for what a plugin raises that is no Exception.

    `cancellation` passes, alone or out of a group of exceptions: what ends a task of the event loop in which the block runs. So does a
    KeyboardInterrupt that a signal raised.
    """
    try:
        yield
    except (Exception, GeneratorExit):  # GeneratorExit: somebody closes the coroutine
        raise
    except BaseException as error:  # the one place for it: cancellation is passed on
        if isinstance(error, cancellation):
            raise
        if isinstance(error, BaseExceptionGroup):
            passing, error = _split(error, cancellation)
            if passing is not None:
                raise passing from None
        if isinstance(error, KeyboardInterrupt) and _is_of_signal(error):
            raise
        raise PluginQuit(_described(error)) from error


def _split(
    group: BaseExceptionGroup[BaseException], cancellation: tuple[type[BaseException], ...]
) -> tuple[BaseException | None, BaseException]:
    """Return what has to pass of a group, and the exception that counts of the rest."""
    passing = group.subgroup(
        lambda error: isinstance(error, cancellation) or (isinstance(error, KeyboardInterrupt) and _is_of_signal(error))
    )
    leaf: BaseException = group
    while isinstance(leaf, BaseExceptionGroup):
        leaf = next((inner for inner in leaf.exceptions if not isinstance(inner, Exception)), leaf.exceptions[0])
    return passing, leaf


def _is_of_signal(error: KeyboardInterrupt) -> bool:
    """Whether a signal handler raised it, which runs in the main thread alone, on top of whatever runs there."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it is not written in Python, and leaves no frame
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    module = str(frames[-1][0].f_globals.get("__name__")) if frames else ""
    return module.startswith(SIGNAL_HANDLERS)


def _described(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it called sys.exit({'' if error.code is None else error.code})"
    return f"it raised {type(error).__name__}{f': {error}' if str(error) else ''}, which is no Exception"
