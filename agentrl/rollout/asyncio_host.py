"""The host of asyncio plugins: one asyncio event loop in its own thread, called from trio.

Under trio, `asyncio.sleep`, `wait_for` and every asyncio library fail, but most users' tools are asyncio
code. A call runs as a task of the asyncio loop. Its result or exception returns to trio; trio's cancellation
cancels the task.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Generic, TypeVar, cast

import trio

from agentrl.plugins.blame import running_plugin
from agentrl.plugins.contained import contained
from agentrl.plugins.stepping import stepping

T = TypeVar("T")
log = logging.getLogger(__name__)


class AsyncioHost:
    """A context manager: the thread runs while it is entered. Thousands of `run` calls can be in flight at
    once.

    `grace_s`: seconds that a cancelled call may take to unwind before it is abandoned. Needed for code that
    blocks the loop or swallows its cancellation; the latter is closed when it goes on.
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

    def call_soon(self, function: Callable[[], None]) -> None:
        """Let the loop call a function; from any thread."""
        self._loop.call_soon_threadsafe(function)

    def __enter__(self) -> AsyncioHost:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_ending = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self._grace_s)

    async def run(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Await `function(*args)` in the asyncio loop and return its result. Call it from trio.

        If the caller is cancelled, the asyncio task is cancelled too. Its `finally` blocks have run before
        this returns, unless they take longer than `grace_s`.
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
                call.is_left = True
                _tell_left(self._grace_s)
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
        """Run the loop until it stops, even if a plugin stops it.

        The tasks survive: the next run continues all of them.
        """
        try:
            run(*args)
        except (KeyboardInterrupt, SystemExit) as error:
            # Not from a signal: signals are handled in the main thread. A task or callback that a plugin left
            # behind raised it, which makes asyncio stop the loop.
            log.warning(
                "code of an asyncio plugin raised %s outside of its call", type(error).__name__, exc_info=True
            )

    async def _end_tasks(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=self._grace_s / 2)


def _tell_left(grace_s: float) -> None:
    who = running_plugin.get() or "an asyncio plugin"
    log.warning("%s was cancelled, did not end within %g s and was left behind", who, grace_s)


class _Call(Generic[T]):
    """One call from trio to asyncio.

    `start` and `cancel` run in the asyncio thread; `result` and `done` are for trio.
    """

    def __init__(
        self, function: Callable[..., Awaitable[T]], args: tuple[object, ...], token: trio.lowlevel.TrioToken
    ) -> None:
        self._function = function
        self._args = args
        self._token = token
        self._task: asyncio.Task[T | None] | None = None
        self.is_left = False
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
        return cast(T, self._task.result())  # None only if it was left behind, so that nobody asks

    async def _guarded(self) -> T | None:
        with contained(asyncio.CancelledError):
            return await stepping(self._awaited(), lambda _: self.is_left)

    async def _awaited(self) -> T:
        return await self._function(*self._args)

    def _report(self, task: asyncio.Task[T | None]) -> None:
        if not task.cancelled():
            task.exception()  # marks it as retrieved: a cancelled caller will not retrieve it
        try:
            self._token.run_sync_soon(self.done.set)
        except trio.RunFinishedError:
            return  # trio has ended: no caller is waiting
