"""`BufferProcess`: the real replay buffer, called under trio in place of its Ray actor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import trio

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.events import Event
from agentrl.buffer.journal import Journal
from agentrl.errors import JournalError

P = ParamSpec("P")
R = TypeVar("R")

RETRY_S = 1.0
"""Pause before a call that the full disk refused is made again, as `workers.actors` has it."""
_TIMEOUTS = {"lease": 2, "take": 1}
"""Methods that wait, with the position of their `timeout_s`."""


class WatchedJournal(Journal):
    """A journal in memory that reports what it wrote, and whose disk can be full."""

    def __init__(self, watch: Callable[[Sequence[Event]], None]) -> None:
        super().__init__(None)
        self._watch = watch
        self.is_full = False

    def append(self, events: Sequence[Event], *args: Any, **kwargs: Any) -> None:
        if self.is_full:
            raise JournalError("the disk is full")
        super().append(events, *args, **kwargs)
        self._watch(events)


class BufferProcess:
    """Calls the buffer like `workers.actors.Actor`: calls take time, and are made again if it dies.

    Its methods never block here. A method that waits is called with a deadline of now, again after each
    change.

    open: returns the buffer, from its journal.
    travel_s: draws the seconds that a call, or its answer, is on its way.
    after_call: called after each call that the buffer answered.
    """

    def __init__(
        self,
        open_buffer: Callable[[], ReplayBuffer],
        *,
        travel_s: Callable[[], float],
        after_call: Callable[[ReplayBuffer], None] = lambda buffer: None,
    ) -> None:
        self._open = open_buffer
        self._travel_s = travel_s
        self._after_call = after_call
        self._changed = trio.Event()
        self.buffer = open_buffer()
        self.dies_before_answer = False
        """The process dies in the next call that changes anything, after its effect and before its answer."""
        self.waited_s = {"lease": 0.0, "take": 0.0}
        """Seconds that callers waited for a group, or for a batch."""

    def within(self, timeout_s: float, /) -> BufferProcess:
        return self

    def restart(self) -> None:
        """Kill the process; another one reads the journal."""
        self.buffer = self._open()
        self._notify()

    async def run_async(
        self, method: Callable[Concatenate[ReplayBuffer, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        await trio.sleep(self._travel_s())
        while True:
            try:
                result: R = await self._answer(method.__name__, args, kwargs)
            except JournalError:
                await trio.sleep(RETRY_S)
                continue
            if not self.dies_before_answer:
                break
            self.dies_before_answer = False
            self.restart()
        await trio.sleep(self._travel_s())
        return result

    async def _answer(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if name not in _TIMEOUTS:
            return self._call(name, args, kwargs)
        place = _TIMEOUTS[name]
        at_once = [*args[:place], 0.0, *args[place + 1 :]]
        started = trio.current_time()
        with trio.move_on_after(args[place]):
            while not (result := self._call(name, at_once, kwargs)):
                await self._changed.wait()
            self.waited_s[name] += trio.current_time() - started
            return result
        self.waited_s[name] += trio.current_time() - started
        return self._call(name, at_once, kwargs)

    def _call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        result = getattr(self.buffer, name)(*args, **kwargs)
        self._after_call(self.buffer)
        if name not in _TIMEOUTS or result:
            self._notify()
        return result

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
