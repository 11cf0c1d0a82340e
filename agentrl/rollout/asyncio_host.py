"""Where asyncio plugins live: one event loop in one thread, reached from trio.

Under trio `asyncio.sleep`, `wait_for` and every asyncio library fail, and most people's tools are asyncio code. A call
crosses over as a task of the loop; its result, its exception, a deadline and a cancellation cross back.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Generic, TypeVar

import trio

from agentrl.plugins.contained import contained

T = TypeVar("T")
log = logging.getLogger(__name__)


class AsyncioHost:
    """A context manager: the thread runs inside of it. `run` may be called thousands of times side by side.

    `grace_s`: how long a cancelled call may take to unwind before it is left behind (code that blocks the loop, or
    swallows its cancellation).
    """

    def __init__(self, *, grace_s: float = 5.0) -> None:
        self._grace_s = grace_s
        self._loop = asyncio.new_event_loop()
        self._is_ending = False
        self._thread = threading.Thread(target=self._main, name="asyncio-plugins", daemon=True)

    @property
    def thread(self) -> threading.Thread:
        """The thread of the loop."""
        return self._thread

    def __enter__(self) -> AsyncioHost:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_ending = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self._grace_s)

    async def run(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Await `function(*args)` in the event loop and return its result; call it from trio.

        When the caller is cancelled, so is the asyncio task, and its `finally` blocks have run before this returns.
        """
        call = _Call(function, args, trio.lowlevel.current_trio_token())
        self._loop.call_soon_threadsafe(call.start)
        try:
            await call.done.wait()
        except trio.Cancelled:
            self._loop.call_soon_threadsafe(call.cancel)
            with trio.move_on_after(self._grace_s, shield=True):
                await call.done.wait()
            if not call.done.is_set():
                log.warning("a cancelled asyncio plugin did not end within %g s and was left behind: %r", self._grace_s, function)
            raise
        return call.result()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._is_ending:
            self._run_on(self._loop.run_forever)
        ending = self._loop.create_task(self._end_tasks())
        while not ending.done():
            self._run_on(self._loop.run_until_complete, ending)
        self._loop.close()

    def _run_on(self, run: Callable[..., object], *args: object) -> None:
        """Run the loop until it stops, also by a plugin's hand. It keeps its tasks: run again, it goes on with all of them."""
        try:
            run(*args)
        except (KeyboardInterrupt, SystemExit) as error:
            # No signal's, in this thread. asyncio ends its loop where a task or callback that a plugin left behind raises one of these.
            log.warning("code of an asyncio plugin raised %s outside of its call", type(error).__name__, exc_info=True)

    async def _end_tasks(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=self._grace_s / 2)


class _Call(Generic[T]):
    """One call's way to the loop and back. `start` and `cancel` run in the loop, the rest in trio."""

    def __init__(self, function: Callable[..., Awaitable[T]], args: tuple[object, ...], token: trio.lowlevel.TrioToken) -> None:
        self._function = function
        self._args = args
        self._token = token
        self._task: asyncio.Task[T] | None = None
        self.done = trio.Event()

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._guarded())
        self._task.add_done_callback(self._report)

    def cancel(self) -> None:
        assert self._task is not None, "the loop runs callbacks in the order they were sent"
        self._task.cancel()

    def result(self) -> T:
        assert self._task is not None
        if self._task.cancelled():
            raise RuntimeError("the plugin's asyncio task was cancelled from within")
        return self._task.result()

    async def _guarded(self) -> T:
        with contained(asyncio.CancelledError):
            return await self._function(*self._args)

    def _report(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # marks it as seen: a caller that was cancelled meanwhile will not ask
        try:
            self._token.run_sync_soon(self.done.set)
        except trio.RunFinishedError:
            return  # nobody waits any more
