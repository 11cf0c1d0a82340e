"""Containment of plugin code: an exception raised by a plugin ends at most its own attempt.

`except Exception` does not catch SystemExit, KeyboardInterrupt and other subclasses of BaseException (such as
a panic in a Rust library), because they are meant to end the whole program. A plugin must not end the
program, so they are converted. Only cancellation, and a signal that arrives while the plugin runs, pass.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

SIGNAL_HANDLERS = ("trio.", "agentrl.fleet.cluster")
"""Modules with signal handlers that raise KeyboardInterrupt."""


class PluginQuit(RuntimeError):
    """A plugin raised an exception that would end the program or a task. `__cause__` is that exception."""


@contextmanager
def contained(*cancellation: type[BaseException]) -> Iterator[None]:
    """Convert any BaseException that is not an Exception to PluginQuit.

    Two kinds pass, alone or extracted from an exception group: `cancellation`, the types with which the event
    loop cancels a task, and a KeyboardInterrupt raised by a signal.
    """
    try:
        yield
    except (Exception, GeneratorExit):  # GeneratorExit: the coroutine is being closed
        raise
    except BaseException as error:  # the only place that catches BaseException: cancellation passes
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
    """Return the part of a group that must pass, and the root error of the rest."""
    passing = group.subgroup(
        lambda error: (
            isinstance(error, cancellation) or (isinstance(error, KeyboardInterrupt) and _is_of_signal(error))
        )
    )
    leaf: BaseException = group
    while isinstance(leaf, BaseExceptionGroup):
        leaf = next(
            (inner for inner in leaf.exceptions if not isinstance(inner, Exception)), leaf.exceptions[0]
        )
    return passing, leaf


def _is_of_signal(error: KeyboardInterrupt) -> bool:
    """Return whether a signal handler raised the error.

    Handlers only run in the main thread, on top of its stack.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # written in C: leaves no frame
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    module = str(frames[-1][0].f_globals.get("__name__")) if frames else ""
    return module.startswith(SIGNAL_HANDLERS)


def _described(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it called sys.exit({'' if error.code is None else error.code})"
    return f"it raised {type(error).__name__}{f': {error}' if str(error) else ''}, which is not an Exception"
