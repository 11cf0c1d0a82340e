"""Containment of plugin code: an exception raised by a plugin ends at most its own attempt.

`except Exception` does not catch SystemExit, KeyboardInterrupt and other subclasses of BaseException (such as
a panic in a Rust library), because they are meant to end the whole program. A plugin must not end the
program, so they are converted. Only cancellation, and a signal that arrives while the plugin runs, pass.
"""

from __future__ import annotations

import signal
import threading
import traceback

SIGNAL_HANDLERS = ("trio.", "agentrl.interrupts")
"""Modules with signal handlers that raise KeyboardInterrupt."""


class PluginQuit(RuntimeError):
    """A plugin raised an exception that would end the program or a task. `__cause__` is that exception."""


def contained(*cancellation: type[BaseException]) -> _Contained:
    """Return a context that converts any BaseException that is not an Exception to PluginQuit.

    Two kinds pass, alone or extracted from an exception group: `cancellation`, the types with which the event
    loop cancels a task, and a KeyboardInterrupt raised by a signal.
    """
    return _Contained(cancellation)


class _Contained:
    """A class, because a generator would cost more than many a call of a plugin."""

    __slots__ = ("_cancellation",)

    def __init__(self, cancellation: tuple[type[BaseException], ...]) -> None:
        self._cancellation = cancellation

    def __enter__(self) -> None:
        return

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        # GeneratorExit: the coroutine is being closed
        if error is None or isinstance(error, (Exception, GeneratorExit)):
            return
        if isinstance(error, self._cancellation):
            return
        if isinstance(error, BaseExceptionGroup):
            passing, error = _split(error, self._cancellation)
            if passing is not None:
                raise passing from None
        if isinstance(error, KeyboardInterrupt) and _is_of_signal(error):
            return
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
