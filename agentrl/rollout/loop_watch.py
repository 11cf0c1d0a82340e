"""Watches the event loops in which plugins run. Code that does not give its loop back stops all attempts of
the process, and no deadline can end it: it is told, and after a while the process is ended.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

import trio

from agentrl.interrupts import INTERRUPTED_STATUS, end_at_once
from agentrl.plugins.last_words import place_in, plugin_in
from agentrl.rollout.asyncio_host import AsyncioHost

POLL_S = 0.5
TOLD_S = 5.0
"""Seconds without an answer of a loop after which it is told."""
MANY, WINDOW_S = 5, 60.0
"""A plugin is also told at which so many looks within so many seconds found its loop kept."""
GRACE_S = 30.0
"""Added to the longest deadline of an attempt: then no attempt of the process can have ended in order."""
INTERRUPTED_S = 10.0
"""Seconds in which everything must end after Ctrl-C."""


@dataclass(eq=False)
class WatchedLoop:
    """An event loop. call_soon: lets it call a function, from any thread.

    silent_s: for how long it has not done so, counted in polls: a process that was stopped has no silence.
    """

    thread: threading.Thread
    call_soon: Callable[[Callable[[], None]], object]
    silent_s: float = 0.0
    is_asked: bool = False

    def poll(self) -> float:
        """Return the silence, and ask again if there is none."""
        self.silent_s = self.silent_s + POLL_S if self.is_asked else 0.0
        if not self.is_asked:
            self.is_asked = True
            try:
                self.call_soon(self._answer)
            except RuntimeError:  # the loop has ended
                self.is_asked = False
        return self.silent_s

    def _answer(self) -> None:
        self.is_asked = False

    def where(self) -> str | None:
        """Return which plugin runs in it, and the user's line; None if it is in none of the user's files."""
        ident = self.thread.ident or 0
        plugin, place = plugin_in(ident), place_in(ident)
        return f"{plugin or 'a plugin'} at {place}" if place else None


class LoopWatch:
    """A context manager: watches from a thread of its own while it is entered.

    Args:
        deadline_s: the longest of an attempt. end: called GRACE_S after it, with what to say and the thread
            of the loop.
        is_interruptible: whether Ctrl-C ends this process; then everything must end soon after it. Enter it
            in the main thread, within trio.
    """

    def __init__(
        self,
        loops: Sequence[WatchedLoop],
        *,
        say: Callable[[str], None],
        deadline_s: float,
        end: Callable[[str, threading.Thread], NoReturn],
        is_interruptible: bool = False,
    ) -> None:
        self._loops = loops
        self._say = say
        self._limit_s = deadline_s + GRACE_S
        self._end = end
        self._is_interruptible = is_interruptible
        self._interrupted_s = -1.0
        self._leaving = threading.Event()
        self._num_polls = 0
        self._kept: dict[str, deque[int]] = {}
        self._told: set[str] = set()

    @property
    def is_blocked(self) -> bool:
        """Whether a loop has not answered for TOLD_S."""
        return any(loop.silent_s >= TOLD_S for loop in self._loops)

    def __enter__(self) -> LoopWatch:
        threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()
        self._handler = signal.getsignal(signal.SIGINT)
        if self._is_interruptible and callable(self._handler):
            signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        if signal.getsignal(signal.SIGINT) == self._interrupt:
            signal.signal(signal.SIGINT, self._handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted_s = max(0.0, self._interrupted_s)
        if callable(self._handler):
            self._handler(number, frame)

    def _watch(self) -> None:
        while not self._leaving.wait(POLL_S):
            self._num_polls += 1
            for loop in self._loops:
                self._look(loop)
            if self._interrupted_s >= 0.0:
                self._interrupted_s += POLL_S
                if self._interrupted_s > INTERRUPTED_S:
                    self._end_interrupted()

    def _look(self, loop: WatchedLoop) -> None:
        silent_s = loop.poll()
        if not silent_s or (where := loop.where()) is None:
            return
        if silent_s >= self._limit_s:
            self._end(_line(where, f"not given back the event loop for {silent_s:.0f} s"), loop.thread)
        elif TOLD_S <= silent_s < TOLD_S + POLL_S:
            self._say(_line(where, f"not given back the event loop for {silent_s:.0f} s"))
        elif silent_s == POLL_S and self._keeps_often(where.partition(" at ")[0]):
            self._say(_line(where, f"kept the event loop {MANY} times within {WINDOW_S:.0f} s"))

    def _keeps_often(self, plugin: str) -> bool:
        """Count a time at which a plugin kept its loop; return whether they become many, once."""
        kept = self._kept.setdefault(plugin, deque(maxlen=MANY))
        kept.append(self._num_polls)
        is_often = len(kept) == kept.maxlen and kept[-1] - kept[0] < WINDOW_S / POLL_S
        if not is_often or plugin in self._told:
            return False
        self._told.add(plugin)
        return True

    def _end_interrupted(self) -> NoReturn:
        where = next((found for loop in self._loops if (found := loop.where())), "a plugin")
        end_at_once(
            f"interrupted; {where} had not ended after {INTERRUPTED_S:g} s and was ended with this process",
            status=INTERRUPTED_STATUS,
        )


def _line(where: str, what: str) -> str:
    return (
        f"{where} has {what}, and all attempts of this process wait for it: await, or call what blocks in a "
        "thread (asyncio.to_thread)"
    )


def watching_command(host: AsyncioHost, *, say: Callable[[str], None], deadline_s: float) -> LoopWatch:
    """Return a watch over the loops of a command that plays in its own process; call it from trio."""
    trio_loop = WatchedLoop(threading.current_thread(), trio.lowlevel.current_trio_token().run_sync_soon)
    loops = [trio_loop, WatchedLoop(host.thread, host.call_soon)]
    is_main = threading.current_thread() is threading.main_thread()
    return LoopWatch(loops, say=say, deadline_s=deadline_s, end=end_command, is_interruptible=is_main)


def end_command(line: str, _thread: threading.Thread) -> NoReturn:
    """End the process of a command."""
    sys.stdout.flush()
    end_at_once(f"error (infrastructure): {line}", status=1)
