"""A tool or interaction during one trajectory: started at its first use, given deadlines, closed exactly once."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio

from agentrl.errors import ToolError, UserError
from agentrl.plugins import Interaction, Tool, WrongCall
from agentrl.plugins.contained import contained
from agentrl.plugins.loops import foreign_loop
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.types import JsonObject

T = TypeVar("T")
log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""`close` runs shielded, also after the trajectory's own deadline: it needs one of its own."""


EMPTY = frozenset({Tool.start, Tool.score, Tool.close, Interaction.start, Interaction.score, Interaction.finalize})
"""What a plugin inherits and need not be asked for: a call of an asyncio plugin costs two changes of threads."""


class GuestTimeout(ToolError):
    """A call ran longer than its deadline."""


class Guest:
    """Wraps one plugin instance; `label` is how errors call it.

    Whatever the plugin raises leaves here as ToolError (with the cause in one line), but for errors of the user's input.
    """

    def __init__(self, plugin: Tool | Interaction, label: str, start_kwargs: JsonObject, *, host: AsyncioHost, timeout_s: float) -> None:
        self._plugin = plugin
        self._label = label
        self._start_kwargs = start_kwargs
        self._host = host
        self._timeout_s = timeout_s
        self._start_lock = trio.Lock()
        self._is_opened = False  # `start` was begun: there may be something to close
        self._is_ready = False

    async def use(self, method: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Call a method of the plugin, after `start` if this is the first use.

        Raises:
            GuestTimeout: `timeout_s` passed (counted anew for `start` and for the call).
            ToolError: the plugin raised.
            WrongCall: the plugin says that it was called wrongly.
        """
        if not self._is_ready and is_inherited(self._plugin.start):
            self._is_opened = self._is_ready = True
        elif not self._is_ready:
            await self._start()
        return await self._within_deadline(method.__name__, method, *args)

    @property
    def _close(self) -> Callable[[], Awaitable[None]]:
        return self._plugin.finalize if isinstance(self._plugin, Interaction) else self._plugin.close

    @property
    def has_to_close(self) -> bool:
        """Whether the plugin was started, and has something to do when it ends."""
        return self._is_opened and not is_inherited(self._close)

    async def close(self) -> None:
        """Close the plugin if it was started. Never raises and never takes long: a failure is logged."""
        if not self.has_to_close:
            return
        self._is_opened = self._is_ready = False
        with trio.CancelScope(shield=True), trio.move_on_after(CLOSE_TIMEOUT_S) as scope:
            try:
                await self._run(self._close)
            except Exception:  # boundary: a plugin raised while it ended, and its trajectory is over
                log.warning("%s failed to close", self._label, exc_info=True)
        if scope.cancelled_caught:
            log.warning("%s did not close within %g s", self._label, CLOSE_TIMEOUT_S)

    async def _start(self) -> None:
        async with self._start_lock:  # parallel first calls start it once
            if self._is_ready:
                return
            self._is_opened = True
            try:
                await self._within_deadline("start", functools.partial(self._plugin.start, **self._start_kwargs))
            except (ToolError, WrongCall) as error:
                await self.close()  # what a failed start took is freed: a later call may start again
                raise ToolError(str(error)) from error  # no fault of the model's call, not even when it took too long
            self._is_ready = True

    async def _within_deadline(self, what: str, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        with trio.move_on_after(self._timeout_s):
            try:
                return await self._run(function, *args)
            except (ToolError, UserError, WrongCall):
                raise
            except Exception as error:  # boundary of one call: a plugin raised
                if (found := foreign_loop(error, self._plugin.runtime)) is not None:
                    other = "trio" if self._plugin.runtime == "asyncio" else "asyncio"
                    raise ToolError(f'{self._label}: `{what}` {found}: write `runtime = "{other}"` in its class') from error
                raise ToolError(f"{self._label} raised in `{what}`: {type(error).__name__}: {error}") from error
        raise GuestTimeout(f"{self._label}: `{what}` timed out after {self._timeout_s:g} s")

    async def _run(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        if self._plugin.runtime == "trio":
            with contained(trio.Cancelled):
                return await awaitable(function, *args)
        return await self._host.run(awaitable, function, *args)


async def awaitable(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Await `function(*args)`; one that returns no awaitable, behind a decorator for instance, is the user's mistake."""
    returned = function(*args)
    if not inspect.isawaitable(returned):
        name = getattr(function, "__name__", "it")
        raise ToolError(f"`{name}` returned {type(returned).__name__} at once, and is awaited: write `async def {name}`")
    return await returned


def is_inherited(method: Callable[..., Any]) -> bool:
    """Whether a plugin's method is the empty one of its base class."""
    return getattr(method, "__func__", None) in EMPTY
