"""A tool, interaction or environment during one attempt: started at its first use, called with deadlines,
closed exactly once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

import trio

from agentrl.errors import ToolError, UserError
from agentrl.plugins import Environment, Interaction, Tool, WrongCall
from agentrl.plugins.blame import wrong_return
from agentrl.plugins.contained import contained
from agentrl.plugins.fields import is_number
from agentrl.plugins.foreign_loop import foreign_loop
from agentrl.plugins.stepping import stepping
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.types import JsonObject

T = TypeVar("T")

CLOSE_TIMEOUT_S = 10.0
"""Deadline of `close`, which runs shielded even after the trajectory's own deadline."""


EMPTY = frozenset(
    {
        *(Tool.start, Tool.score, Tool.close),
        *(Interaction.start, Interaction.score, Interaction.finalize),
        *(Environment.start, Environment.facts, Environment.close),
    }
)
"""Empty methods of the base classes.

Calls to them are skipped: a call to an asyncio plugin costs two thread switches.
"""


class GuestTimeout(ToolError):
    """A call ran longer than its deadline."""


class Guest:
    """Wraps one plugin instance; `label` names it in errors.

    Any error of the plugin becomes a ToolError with the cause in one line, except UserError, and WrongCall of
    a tool, which pass.
    """

    def __init__(
        self,
        plugin: Tool | Interaction | Environment,
        label: str,
        start_kwargs: JsonObject,
        *,
        host: AsyncioHost,
        timeout_s: float,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        self._plugin = plugin
        self._label = label
        self._start_kwargs = start_kwargs
        self._host = host
        self._timeout_s = timeout_s
        self._close_timeout_s = close_timeout_s
        self._start_lock: trio.Lock | None = None
        self._is_opened = False  # `start` began: there may be something to close
        self._is_ready = False

    async def use(self, method: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Call a method of the plugin. The first use calls `start` before it.

        Raises:
            GuestTimeout: the call took longer than `timeout_s`. A `start` that takes longer raises ToolError.
            ToolError: the plugin raised.
            WrongCall: the plugin is a tool, and rejected the call as wrong.
        """
        if not self._is_ready:
            await self.start()
        return await self._within_deadline(method.__name__, method, *args)

    async def score(self) -> float | None:
        """Return the plugin's final score, or None.

        Raises:
            ToolError: it raised, timed out, or returned something other than a finite number.
        """
        assert not isinstance(self._plugin, Environment), "an environment has no score"
        score = await self.use(self._plugin.score)
        if not is_number(score):
            cure = "return a finite number, or None"
            raise wrong_return(f"{self._label}: `score`", self._plugin.score, score, cure)
        return None if score is None else float(score)

    async def start(self) -> None:
        """Call the plugin's `start`, unless that is done.

        Raises:
            ToolError: it raised, or took longer than `timeout_s`.
        """
        if is_inherited(self._plugin.start):
            self._is_opened = self._is_ready = True
        else:
            await self._start()

    @property
    def _close(self) -> Callable[[], Awaitable[None]]:
        return self._plugin.finalize if isinstance(self._plugin, Interaction) else self._plugin.close

    @property
    def has_to_close(self) -> bool:
        """Whether the plugin was started and overrides its closing method."""
        return self._is_opened and not is_inherited(self._close)

    async def close(self) -> ToolError | None:
        """Close the plugin if it was started, and return why that failed; None if it did not.

        Never raises and takes at most `close_timeout_s`.
        """
        if not self.has_to_close:
            return None
        self._is_opened = self._is_ready = False
        with trio.CancelScope(shield=True), trio.move_on_after(self._close_timeout_s) as scope:
            try:
                await self._run(self._close)
            except Exception as error:  # noqa: BLE001 - boundary: a plugin raised, its attempt is over
                raised = f"raised in `{self._close.__name__}`: {type(error).__name__}: {error}"
                failed = ToolError(f"{self._label} {raised}")
                failed.__cause__ = error
                return failed
        if not scope.cancelled_caught:
            return None
        return GuestTimeout(
            f"{self._label}: `{self._close.__name__}` timed out after {self._close_timeout_s:g} s"
        )

    async def _start(self) -> None:
        self._start_lock = self._start_lock or trio.Lock()
        async with self._start_lock:  # concurrent first calls start it only once
            if self._is_ready:
                return
            self._is_opened = True
            try:
                await self._within_deadline(
                    "start", functools.partial(self._plugin.start, **self._start_kwargs)
                )
            except (ToolError, WrongCall) as error:
                await (
                    self.close()
                )  # releases what the failed start acquired, so that a later call can start again
                raise ToolError(
                    str(error)
                ) from error  # not the fault of the model's call, not even a timeout
            self._is_ready = True

    async def _within_deadline(self, what: str, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        with trio.move_on_after(self._timeout_s):
            try:
                return await self._run(function, *args)
            except (ToolError, UserError):
                raise
            except Exception as error:  # boundary of one call: a plugin raised
                if isinstance(error, WrongCall) and isinstance(self._plugin, Tool):
                    raise
                if (found := foreign_loop(error, self._plugin.runtime)) is not None:
                    other = "trio" if self._plugin.runtime == "asyncio" else "asyncio"
                    raise ToolError(
                        f'{self._label}: `{what}` {found}: write `runtime = "{other}"` in its class'
                    ) from error
                raise ToolError(
                    f"{self._label} raised in `{what}`: {type(error).__name__}: {error}"
                ) from error
        raise GuestTimeout(f"{self._label}: `{what}` timed out after {self._timeout_s:g} s")

    async def _run(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        if self._plugin.runtime == "trio":
            with contained(trio.Cancelled):
                return cast(T, await stepping(awaitable(function, *args)))
        return await self._host.run(awaitable, function, *args)


async def awaitable(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Await `function(*args)`.

    Raises:
        ToolError: the function is not async, which only shows here if it is decorated.
    """
    returned = function(*args)
    if not inspect.isawaitable(returned):
        name = getattr(function, "__name__", "it")
        raise ToolError(
            f"`{name}` returned {type(returned).__name__} without being async, but is awaited: write `async "
            f"def {name}`"
        )
    return await returned


def is_inherited(method: Callable[..., Any]) -> bool:
    """Return whether a plugin's method is the empty method of its base class."""
    return getattr(method, "__func__", None) in EMPTY
