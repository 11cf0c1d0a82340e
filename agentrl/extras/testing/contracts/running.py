"""Runs a plugin's methods without the rollout loop, under the plugin's runtime and with a deadline."""

from __future__ import annotations

import asyncio
import math
import re
import unittest
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar, TypeVar

import trio

from agentrl.errors import PluginError
from agentrl.plugins import Environment, Registry, Runtime, load_plugins

T = TypeVar("T")

DEADLINE_S = 30.0
"""Deadline of every step of a contract. It is generous, because it only stops plugins that hang."""

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

ODD_TEXTS = {
    "empty": "",
    "spaces": " \n\t ",
    "unicode": "日本語 🙂 é ‮rtl",
    "controls": "\x00\x1b[31m\x7f",
    "markup": '<tool_call>{"name": 1}</tool_call><|im_end|>',
    "json": '{"answer": null, "n": [1e999, -0]}',
    "digits": "#### -1,234.5e6789 %d {} 7" + "7" * 400,
    "huge": "lorem ipsum 42 " * 20_000,
}
"""Unusual texts that a model may produce. No plugin may break on them."""


class InEnvironment:
    """What the contracts of plugins share that may need an environment.

    environment: a class, a registered name, or `file.py:Class`; None: the plugin needs none.
    environment_config: the environment's options, as in `agent.environment_config`.
    environment_kwargs: arguments that a row passes to its `start`.
    """

    environment: ClassVar[type[Environment] | str | None] = None
    environment_config: ClassVar[Mapping[str, Any]] = {}
    environment_kwargs: ClassVar[Mapping[str, Any]] = {}

    @asynccontextmanager
    async def _in_environment(self, plugin: Any) -> AsyncIterator[None]:
        """Give the plugin its environment in the block, if it needs one."""
        if self.environment is None:
            yield
            return
        plugin.environment = self._environment_class()(dict(self.environment_config))
        try:
            await plugin.environment.start(**self.environment_kwargs)
            yield
        finally:
            await plugin.environment.close()

    def _environment_settings(self) -> dict[str, Any]:
        """Return the arguments of `play` for the environment."""
        if self.environment is None:
            return {}
        config = {self._environment_class().name: dict(self.environment_config)}
        return {
            "environment": self.environment,
            "environment_kwargs": dict(self.environment_kwargs),
            "environment_config": config,
        }

    def _environment_class(self) -> type[Environment]:
        assert self.environment is not None
        return plugin_class(load_plugins().environments, self.environment)


def first(examples: Sequence[T], attribute: str) -> T:
    """Return the first example. Without one, skip the law: another one fails and says so."""
    if not examples:
        raise unittest.SkipTest(f"`{attribute}` has no example")
    return examples[0]


def check_calls(log: Sequence[str], *expected: str) -> None:
    """Assert that exactly these methods were called; `log` is that of `recorded`."""
    raised = next((entry for entry in log if " raised " in entry), None)
    called = f"called: {', '.join(log) or 'nothing'}; expected: {', '.join(expected)}"
    assert list(log) == list(expected), called if raised is None else raised


def run(runtime: Runtime, main: Callable[[], Awaitable[T]]) -> T:
    """Run `main()` under `runtime` and return its result.

    Raises:
        TimeoutError: it took longer than DEADLINE_S (trio.TooSlowError under trio).
    """
    if runtime == "trio":

        async def bounded() -> T:
            with trio.fail_after(DEADLINE_S):
                return await main()

        return trio.run(bounded)

    async def bounded_asyncio() -> T:
        async with asyncio.timeout(DEADLINE_S):
            return await main()

    return asyncio.run(bounded_asyncio())


async def side_by_side(runtime: Runtime, *functions: Callable[[], Awaitable[T]]) -> list[T]:
    """Run the functions concurrently and return their results in order."""
    if runtime == "asyncio":
        return list(await asyncio.gather(*(function() for function in functions)))
    results: dict[int, T] = {}

    async def keep(index: int, function: Callable[[], Awaitable[T]]) -> None:
        results[index] = await function()

    async with trio.open_nursery() as nursery:
        for index, function in enumerate(functions):
            nursery.start_soon(keep, index, function)
    return [results[index] for index in range(len(functions))]


async def cancelled_at_first_wait(runtime: Runtime, function: Callable[[], Awaitable[Any]]) -> None:
    """Cancel `function()` at its first wait and assert that it ends without an error.

    It may also return normally.
    """
    if runtime == "trio":
        with trio.CancelScope() as scope:
            scope.cancel()
            await function()
        return
    task = asyncio.ensure_future(function())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    problem = None if task.cancelled() else task.exception()
    assert problem is None, (
        f"a cancelled call raised {type(problem).__name__}: {problem}; let asyncio.CancelledError pass"
    )


def recorded(
    base: type[Any], verbs: Sequence[str], behaviour: Mapping[str, Any], **attributes: Any
) -> tuple[type[Any], list[str]]:
    """Return a subclass of a plugin that logs the calls of `verbs`, and the log.

    The last verb ends the plugin's life: it is logged when it has returned, or with the error that it raised.
    `behaviour` replaces methods.
    """
    log: list[str] = []

    def logged(verb: str) -> Callable[..., Awaitable[Any]]:
        async def method(plugin: Any, *args: Any, **kwargs: Any) -> Any:
            if verb != verbs[-1]:
                log.append(verb)
            try:
                result = await behaviour.get(verb, getattr(base, verb))(plugin, *args, **kwargs)
            except Exception as error:
                if verb == verbs[-1]:
                    log.append(f"`{verb}` raised {type(error).__name__}: {error}")
                raise
            if verb == verbs[-1]:
                log.append(verb)
            return result

        method.__name__ = verb  # errors name it
        return method

    methods = {verb: logged(verb) for verb in verbs}
    return type(base.__name__, (base,), {**methods, **attributes, "__module__": base.__module__}), log


async def hang(plugin: Any, *_: Any) -> Any:
    """Never answer, in the runtime of the plugin."""
    await (asyncio.sleep(3600) if plugin.runtime == "asyncio" else trio.sleep_forever())
    raise AssertionError("unreachable")


def left_tasks() -> set[asyncio.Task[Any]]:
    """Return the running asyncio tasks except the current one."""
    return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]


def plugin_class(registry: Registry[Any], plugin: Any) -> type[Any]:
    """Return the class of the plugin under test, given as a class, a typed function, a registered name or a
    reference.
    """
    return registry.get(plugin) if isinstance(plugin, str) else registry.add(plugin)


def check_name(registry: Registry[Any], cls: type[Any]) -> None:
    """Assert that the plugin's name can be used in a config and is the one it is registered under."""
    name = getattr(cls, "name", None)
    assert isinstance(name, str), f"{cls.__name__} has no class attribute `name`"
    assert NAME.fullmatch(name), f"name {name!r}: use 1 to 64 letters, digits, _ . or -"
    try:
        found = registry.get(name)
    except PluginError as error:
        raise AssertionError(f"{cls.__name__} cannot be registered: {error}") from error
    assert found.name == name, f"registered as {name!r}, but calls itself {found.name!r}"


def check_number(value: Any, what: str) -> None:
    """Assert that a value is None or a finite number."""
    assert value is None or (isinstance(value, (int, float)) and math.isfinite(value)), (
        f"{what} is {value!r}; it must be None or a finite number"
    )


def check_metrics(metrics: Mapping[str, Any]) -> None:
    """Assert that metrics have text names and finite values."""
    for key, value in metrics.items():
        assert isinstance(key, str), f"metric {key!r} has no text as its name"
        assert isinstance(value, (int, float)), f"metric {key!r} is {value!r}, no number"
        assert math.isfinite(value), f"metric {key!r} is {value!r}, not finite"
