"""Turns an exception into a Failure: the plugin at fault, the message, and the line in the user's own file.

A plugin's exception passes through wrappers, event loops, threads and processes. Its place is the innermost
frame in user
code: a file that belongs neither to agentrl, nor to the standard library, nor to an installed package. If
there is no such frame (a built-in plugin failed), the place is in that plugin.
"""

from __future__ import annotations

import inspect
import linecache
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

from agentrl.errors import AgentRLError, InfrastructureError, ToolError
from agentrl.plugins.contained import PluginQuit
from agentrl.plugins.fields import FORGOT_AWAIT, described
from agentrl.plugins.sources import named_by_user
from agentrl.types import Failure, PluginId, PluginKind

MAX_TEXT_CHARS = 500
MAX_FRAMES = 20
"""Number of innermost frames to keep: an infinite recursion has a thousand."""

_BLAMED = "agentrl_plugin"
_LIBRARY_FOLDERS = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_PLUGIN_PACKAGES = tuple(
    f"agentrl.{name}." for name in ("agents", "tools", "interactions", "rewards", "adapters")
)
_CALLERS = frozenset(
    f"agentrl.rewards.{name}" for name in ("calls", "custom", "pool", "worker", "recipes", "select")
)
"""Modules in the rewards package that are not rewards."""


running_plugin: ContextVar[PluginId | None] = ContextVar("running_plugin", default=None)
"""The plugin that the current task or thread calls; `blaming` sets it."""


class RaisedElsewhere(Exception):
    """Represents a failure without a traceback in this process's chain of causes: an exception of another
    process, or a wrong return value.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class blaming:
    """Mark exceptions raised in the block as raised by this plugin, unless an inner block marked them
    already.

    A class, because a generator would cost more than many a call of a plugin.
    """

    __slots__ = ("_plugin", "_token")

    def __init__(self, kind: PluginKind, name: str) -> None:
        self._plugin = PluginId(kind, name)

    def __enter__(self) -> None:
        self._token = running_plugin.set(self._plugin)

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        running_plugin.reset(self._token)
        if isinstance(error, Exception) and not hasattr(error, _BLAMED):
            setattr(error, _BLAMED, self._plugin)


def failure_of(error: BaseException, *, otherwise: PluginId | None = None) -> Failure:
    """Return the Failure of an exception.

    `otherwise`: the plugin to blame if `blaming` did not mark the exception.
    """
    plugin = getattr(error, _BLAMED, otherwise)
    chain = list(_chain(_raised_by_plugin(error)))
    text = _text(error, plugin) + (f"; {FORGOT_AWAIT}" if _lacks_await(chain[0]) else "")
    if isinstance(chain[0], RaisedElsewhere):
        there = chain[0].failure
        return Failure(text, plugin, there.error, there.place, there.traceback)
    kept = next(((one, frames) for one in chain if (frames := _frames(one, "user"))), None)
    kept = kept or next(((one, frames) for one in chain if (frames := _frames(one, "plugin"))), None)
    if kept is None:  # our own errors need no place; for bugs of ours the place helps
        kept = chain[0], [] if isinstance(chain[0], AgentRLError) else _frames(chain[0], "any")
    shown, frames = kept
    return Failure(text, plugin, type(chain[0]).__name__, _place(frames), _traceback(shown, frames))


def wrong_return(who: str, function: Callable[..., Any], returned: object, cure: str) -> ToolError:
    """Return the error of a plugin whose function returned something that its contract does not allow. It is
    placed at the function's definition, because no traceback leads there.
    """
    text = f"{who} returned {described(returned)}; {cure}"
    if inspect.iscoroutine(returned):
        returned.close()  # or Python warns of it later, without its cause
    error = ToolError(text)
    error.__cause__ = RaisedElsewhere(Failure(text, error=ToolError.__name__, place=_defined_at(function)))
    return error


def first_line(error: BaseException) -> str:
    """Return the message of an exception on one line, at most MAX_TEXT_CHARS characters."""
    return " ".join(str(error).split())[:MAX_TEXT_CHARS]


def _text(error: BaseException, plugin: PluginId | None) -> str:
    message = first_line(error)
    if isinstance(error, InfrastructureError):  # its message already says what broke
        return message if plugin is None or str(plugin) in message else f"{plugin}: {message}"
    raised = f"{type(error).__name__}: {message}"
    return raised if plugin is None else f"{plugin} raised {raised}"


def _lacks_await(error: BaseException) -> bool:
    """Return whether an error is that of a coroutine which was used in place of its result."""
    return isinstance(error, TypeError | AttributeError) and "'coroutine'" in str(error).replace('"', "'")


def _defined_at(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f"{named_by_user(code.co_filename)}:{code.co_firstlineno}"


def _raised_by_plugin(error: BaseException) -> BaseException:
    """Follow the causes of errors raised by our own code to the first error raised elsewhere."""
    while isinstance(error, (AgentRLError, PluginQuit)) and error.__cause__ is not None and _is_ours(error):
        error = error.__cause__
    return error


def _is_ours(error: BaseException) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return not frames or _kind(frames[-1]) == "machinery"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, then its causes and contexts, each once."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ if one.__cause__ is not None or one.__suppress_context__ else one.__context__


@dataclass(frozen=True, slots=True)
class _Frame:
    """One frame of a traceback. is_wanted: the frame is in the requested kind of code."""

    file: str
    line: int
    function: str
    source: str
    is_wanted: bool


def _frames(error: BaseException, wanted: Literal["user", "plugin", "any"]) -> list[_Frame]:
    """Return the frames from the first of the wanted kind on, without our own machinery; [] if no frame is of
    that kind.
    """
    frames: list[_Frame] = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        kind = _kind(frame)
        is_wanted = wanted in (kind, "any")
        if is_wanted or (frames and kind != "machinery"):
            frames.append(_read(frame, line, is_wanted=is_wanted))
    return frames


def _kind(frame: FrameType) -> Literal["user", "plugin", "machinery", "library"]:
    module, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
    if module.partition(".")[0] == "agentrl":
        return "plugin" if module.startswith(_PLUGIN_PACKAGES) and module not in _CALLERS else "machinery"
    return "library" if is_of_library(file) else "user"


def is_of_library(file: str) -> bool:
    """Return whether code belongs to the standard library or to an installed package."""
    is_installed = {"site-packages", "dist-packages"} & set(file.split(os.sep))
    return file.startswith("<") or bool(is_installed) or file.startswith(_LIBRARY_FOLDERS)


def _read(frame: FrameType, line: int, *, is_wanted: bool) -> _Frame:
    file = frame.f_code.co_filename
    return _Frame(
        named_by_user(file), line, frame.f_code.co_name, linecache.getline(file, line).strip(), is_wanted
    )


def _place(frames: list[_Frame]) -> str:
    innermost = next((frame for frame in reversed(frames) if frame.is_wanted), None)
    return "" if innermost is None else f"{innermost.file}:{innermost.line}"


def _traceback(error: BaseException, frames: list[_Frame]) -> str:
    if not frames:
        return ""
    lines = [
        f'  File "{frame.file}", line {frame.line}, in {frame.function}\n    {frame.source}'
        for frame in frames[-MAX_FRAMES:]
    ]
    return "\n".join(["Traceback (most recent call last):", *lines, type(error).__name__])
