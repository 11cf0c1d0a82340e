"""Checks of plugins before use. Each error is one line with the user's file, what is wrong, and the cure.

`check_class` checks a class when it is registered. `check_instance` checks the first instance, because a tool
may build its schema from its config. `check_start` checks the arguments that a row passes to `start`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from agentrl.errors import PluginError
from agentrl.plugins.functions import NAME
from agentrl.plugins.rewards import RunsIn, Scope
from agentrl.plugins.tools import Runtime

ASYNC_PLACES: tuple[RunsIn, ...] = ("asyncio", "trio")
"""Values of a reward's `runs_in` under which `score` is awaited."""


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a contract: its arguments, and whether it is awaited (None: another attribute decides)."""

    name: str
    arguments: tuple[str, ...] = ()
    is_async: bool | None = True


METHODS: Mapping[str, tuple[Method, ...]] = {
    "tool": (
        Method("start", (), True),
        Method("call", ("arguments",)),
        Method("score"),
        Method("close"),
        Method("schema", (), False),
    ),
    "interaction": (Method("start"), Method("respond", ("messages",)), Method("score"), Method("finalize")),
    "environment": (Method("start"), Method("facts"), Method("close")),
    "agent": (
        Method("prompt", ("task", "tools"), False),
        Method("opponents", ("task",), False),
        Method("run", ("task", "session")),
    ),
    "reward": (Method("check", ("task",), False), Method("score", ("attempt",), None)),
}
"""The methods of each kind of plugin. The arguments of `start` depend on the row: see `check_start`."""


def check_class(kind: str, cls: type[Any]) -> None:
    """Check a plugin's class.

    Raises:
        PluginError: the class has no name, its constructor takes no config, a method is missing, or a method
            has the wrong arguments or is async where it must not be (or the reverse).
    """
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name.strip():
        found = "has no `name`" if name is None else f"has name = {name!r}"
        raise PluginError(
            f'{kind} class {cls.__name__} ({place(cls)}) {found}: write `name = "{_snake(cls.__name__)}"` in '
            "the class"
        )
    label = f"{kind} {name!r} ({place(cls)})"
    if kind == "tool" and not NAME.fullmatch(name):
        raise PluginError(f"{label}: a tool's name has 1 to 64 letters, digits, _ . or -")
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        raise PluginError(
            f"{label} does not define {', '.join(f'`{_signature(kind, method)}`' for method in missing)}"
        )
    if not _takes(cls, {}):
        raise PluginError(
            f"{label}: it is constructed as {cls.__name__}(config): write `def __init__(self, config=None)`, "
            "and read the settings there"
        )
    for method in METHODS[kind]:
        _check_method(kind, cls, method)


def check_instance(kind: str, plugin: Any) -> None:
    """Check the attributes of an instance, which may depend on its config.

    Raises:
        PluginError: an attribute is missing or has an invalid value.
    """
    label = f"{kind} {plugin.name!r} ({place(type(plugin))})"
    if kind in ("tool", "interaction", "environment"):
        _check_choice(label, "runtime", plugin.runtime, get_args(Runtime))
    if kind == "tool":
        _check_tool(label, plugin)
    if kind == "agent":
        _check_needs(label, plugin)
    if kind == "reward":
        _check_reward(label, plugin)


def check_start(kind: str, plugin: Any, kwargs: Mapping[str, Any], *, column: str) -> None:
    """Check that `start` accepts the arguments of a row; `column` is the row's column that holds them.

    Raises:
        PluginError: an argument is unexpected or missing.
    """
    try:
        inspect.signature(plugin.start).bind(**kwargs)
    except TypeError as error:
        given = ", ".join(sorted(kwargs)) or "nothing"
        raise PluginError(
            f"{kind} {plugin.name!r} ({place(type(plugin).start)}): `start{inspect.signature(plugin.start)}` "
            f"{_of_bind(error)}; the row's {column} passes {given}"
        ) from error


def place(where: Any) -> str:
    """Return the file and line of a class or function, as `path:line`; the module's name if they are
    unknown.
    """
    where = inspect.unwrap(where) if callable(where) and not inspect.isclass(where) else where
    try:
        file = inspect.getsourcefile(where)
        line = (
            where.__code__.co_firstlineno if hasattr(where, "__code__") else inspect.getsourcelines(where)[1]
        )
    except (OSError, TypeError):
        return str(getattr(where, "__module__", type(where).__name__))
    path = Path(file or "")
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}"


def _check_method(kind: str, cls: type[Any], method: Method) -> None:
    function = getattr(cls, method.name)
    label = f"{kind} {cls.name!r} ({place(function)})"
    if not callable(function):
        raise PluginError(
            f"{label}: `{method.name}` is {function!r}; write it as `{_signature(kind, method.name)}`"
        )
    if not inspect.isfunction(function):  # a static method or callable object: errors show in use
        return
    arguments = _arguments(kind, cls, method)
    if method.name != "start" and not (_takes(function, None, *arguments) and _is_named(function, arguments)):
        raise PluginError(
            f"{label}: `{method.name}{inspect.signature(function)}` is called with "
            f"{', '.join(arguments) or 'no argument'}: write "
            f"`{_signature(kind, method.name, arguments)}`"
        )
    if method.is_async is not None:
        check_awaited(function, label, method.name, is_async=method.is_async)


def _arguments(kind: str, cls: type[Any], method: Method) -> tuple[str, ...]:
    """Return the names of a method's arguments. A reward of several attempts has `attempts`."""
    is_of_several = kind == "reward" and getattr(cls, "scope", "") in ("group", "batch")
    return ("attempts",) if is_of_several and method.name == "score" else method.arguments


def _is_named(function: Callable[..., Any], arguments: Sequence[str]) -> bool:
    """Return whether parameters have the contract's names, so that a tool's `call(self, city)` is not taken
    for one that gets a city. `*args` and names that begin with an underscore pass.
    """
    parameters = list(inspect.signature(function).parameters.values())[1:]
    named = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return all(name == given or given.startswith("_") for name, given in zip(arguments, named, strict=False))


def check_awaited(function: Callable[..., Any], label: str, name: str, *, is_async: bool) -> None:
    """Check that a function is async if `is_async`, and not async otherwise.

    Raises:
        PluginError: the function is of the other kind, or a generator. Decorated functions pass: their kind
            only shows when they are called.
    """
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise PluginError(f"{label}: `{name}` is a generator; return the result instead of yielding it")
    if is_async and not inspect.iscoroutinefunction(function) and not _may_be_awaited(function):
        raise PluginError(f"{label}: `{name}` is not async: write `async def {name}`")
    if not is_async and inspect.iscoroutinefunction(function):
        raise PluginError(f"{label}: `{name}` is async but never awaited: write `def {name}`")


def _may_be_awaited(function: Callable[..., Any]) -> bool:
    """Return whether a plain function may return an awaitable: it is decorated, or its annotation says so."""
    returns = str(getattr(function, "__annotations__", {}).get("return", ""))
    return (
        hasattr(function, "__wrapped__")
        or not inspect.isfunction(function)
        or "Awaitable" in returns
        or "Coroutine" in returns
    )


def _check_tool(label: str, tool: Any) -> None:
    description, parameters = getattr(tool, "description", None), getattr(tool, "parameters", None)
    if not isinstance(description, str) or not description.strip():
        raise PluginError(
            f'{label} has no `description`: write `description = "..."` in the class; the model reads it to '
            "choose the tool"
        )
    if not isinstance(parameters, Mapping):
        found = "no `parameters`" if parameters is None else f"parameters = {parameters!r}"
        raise PluginError(
            f"{label} has {found}: write the JSON schema of its arguments, such as `parameters = "
            '{"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}`'
        )
    if parameters.get("type") != "object":
        raise PluginError(
            f"{label}: `parameters` has type {parameters.get('type')!r}: a call passes one object, so write "
            '"type": "object"'
        )


def _check_needs(label: str, agent: Any) -> None:
    needed = agent.required_tools
    if (
        isinstance(needed, str)
        or not isinstance(needed, Sequence)
        or not all(isinstance(name, str) for name in needed)
    ):
        raise PluginError(
            f"{label}: required_tools={needed!r} must be a tuple of names, such as `required_tools = "
            '("calculator",)`'
        )
    if needed and not agent.uses_tools:
        raise PluginError(
            f"{label}: it requires {', '.join(needed)}, but has uses_tools = False: remove one of the two"
        )


def _check_reward(label: str, reward: Any) -> None:
    _check_choice(label, "runs_in", reward.runs_in, get_args(RunsIn))
    _check_choice(label, "scope", reward.scope, get_args(Scope))
    is_async = reward.runs_in in ASYNC_PLACES
    if inspect.iscoroutinefunction(reward.score) and not is_async:
        raise PluginError(
            f"{label}: `score` is async, but runs_in = {reward.runs_in!r} does not await it: write `runs_in "
            '= "asyncio"`'
        )
    is_plain = inspect.ismethod(reward.score) and not inspect.iscoroutinefunction(reward.score)
    if is_async and is_plain and not _may_be_awaited(reward.score.__func__):
        raise PluginError(
            f"{label}: `score` is not async, but runs_in = {reward.runs_in!r} awaits it: write `async def "
            "score`"
        )
    if reward.max_concurrent is not None and not (
        isinstance(reward.max_concurrent, int) and reward.max_concurrent >= 1
    ):
        raise PluginError(f"{label}: max_concurrent={reward.max_concurrent!r} must be None or at least 1")


def _check_choice(label: str, attribute: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise PluginError(f"{label}: {attribute} = {value!r} must be one of {', '.join(choices)}")


def _takes(function: Callable[..., Any], *arguments: Any) -> bool:
    """Return whether a call with these arguments fits the signature; True if there is no signature."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return True
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def _signature(kind: str, name: str, arguments: Sequence[str] | None = None) -> str:
    method = next((one for one in METHODS[kind] if one.name == name), Method(name))
    given = method.arguments if arguments is None else arguments
    return f"{'async ' if method.is_async else ''}def {name}({', '.join(('self', *given))})"


def _of_bind(error: TypeError) -> str:
    """Return the error of `Signature.bind` as a verb phrase, the same for all versions of Python."""
    text = str(error).replace(" keyword-only ", " ")
    return (
        f"gets {text[4:]}"
        if text.startswith("got ")
        else f"lacks {text.removeprefix('missing ')}"
        if text.startswith("missing")
        else text
    )


def _snake(name: str) -> str:
    return "".join(
        f"_{letter.lower()}" if letter.isupper() and index else letter.lower()
        for index, letter in enumerate(name)
    )
