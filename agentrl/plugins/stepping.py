"""Runs a coroutine of a plugin step by step: each step is noted (`last_words`), and one that never ends can
be left behind.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from agentrl.plugins.last_words import note, noting

T = TypeVar("T")


@types.coroutine
def stepping(
    coroutine: Coroutine[Any, Any, T], is_left: Callable[[object], bool] | None = None
) -> Generator[Any, Any, T | None]:
    """Await a coroutine and return its value.

    is_left: called with what each wait of the coroutine returned or raised. If it is true, the coroutine is
        closed instead of going on, however it takes that, and None is returned.
    """
    said = note()
    step: Callable[[], Any] = partial(coroutine.send, None)
    while True:
        try:
            with noting(said):
                waits_for = step()
        except StopIteration as end:
            value: T = end.value
            return value
        heard: object
        try:
            heard = yield waits_for
            step = partial(coroutine.send, heard)
        except GeneratorExit:
            coroutine.close()
            raise
        except BaseException as error:  # noqa: BLE001 - asyncio throws what it cancels with; passed on
            heard = error
            step = partial(coroutine.throw, error)
        if is_left is not None and is_left(heard):
            with suppress(RuntimeError):  # it swallows this too
                coroutine.close()
            return None
