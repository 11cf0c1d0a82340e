"""The user's function as a reward, with verl's signature for one attempt or for a whole batch."""

from __future__ import annotations

import inspect
import itertools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeGuard

from agentrl.errors import ConfigError, PluginError, RewardError
from agentrl.plugins import Attempted, BatchReward, Reference, Reward, RewardResult
from agentrl.plugins.checks import check_awaited, place
from agentrl.plugins.rewards import RunsIn

MAX_SHOWN_CHARS = 80
BY_CONVERSATION = "by_conversation"
"""The key of a function's dict with the rewards of single conversations."""
ENVIRONMENT = "environment"
"""The parameter for which a function gets the attempt's environment."""


class CustomFunction(Reward):
    """The user's `compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)`, sync or
    async.

    It returns a number, a dict with `score` (its other numbers become metrics, `by_conversation` the rewards
    of conversations, all else details), or None if it does not apply. `solution_str` is the text of all
    messages after the prompt. `extra_info` is the task's, with `num_turns` as verl counts it, and the
    environment's facts as `environment_facts`; it is omitted if the function does not take it. A function
    with a parameter `environment` gets the attempt's.
    """

    name: ClassVar[str] = "custom"
    reads_solution_str: ClassVar[bool] = True
    passes: ClassVar[tuple[str, ...]] = ("data_source", "solution_str", "ground_truth", "extra_info")

    def __init__(
        self, function: Callable[..., Any], kwargs: Mapping[str, Any], runs_in: RunsIn = "thread"
    ) -> None:
        super().__init__()
        self._function = function
        self._kwargs = dict(kwargs)
        self._takes_extra_info = _takes(function, "extra_info")
        self._takes_environment = _names(function, ENVIRONMENT)
        self.runs_in = "asyncio" if inspect.iscoroutinefunction(function) else runs_in

    def score(self, attempt: Attempted) -> Any:
        """Return the result, or an awaitable of it if the function is async."""
        returned = self._function(**self._arguments(attempt))
        return _awaited(returned) if self.runs_in == "asyncio" else result_of(returned)

    def _arguments(self, attempt: Attempted) -> dict[str, Any]:
        task = attempt.task
        return {
            "data_source": task.data_source,
            "solution_str": attempt.solution_str,
            "ground_truth": task.ground_truth,
            **({"extra_info": _extra_info(attempt)} if self._takes_extra_info else {}),
            **({ENVIRONMENT: attempt.environment} if self._takes_environment else {}),
            **self._kwargs,
        }


class CustomBatchFunction(BatchReward):
    """The user's `compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs)`, sync or
    async.

    All four are lists with one entry per attempt of the batch. It returns such a list, with entries like
    CustomFunction's.
    """

    name: ClassVar[str] = "custom"
    reads_solution_str: ClassVar[bool] = True
    passes: ClassVar[tuple[str, ...]] = ("data_sources", "solution_strs", "ground_truths", "extra_infos")

    def __init__(
        self, function: Callable[..., Any], kwargs: Mapping[str, Any], runs_in: RunsIn = "thread"
    ) -> None:
        super().__init__()
        self._function = function
        self._kwargs = dict(kwargs)
        self.runs_in = "asyncio" if inspect.iscoroutinefunction(function) else runs_in

    def score(self, attempts: Sequence[Attempted]) -> Any:
        """Return the results, or an awaitable of them if the function is async."""
        returned = self._function(
            data_sources=[attempt.task.data_source for attempt in attempts],
            solution_strs=[attempt.solution_str for attempt in attempts],
            ground_truths=[attempt.task.ground_truth for attempt in attempts],
            extra_infos=[_extra_info(attempt) for attempt in attempts],
            **self._kwargs,
        )
        return _all_awaited(returned) if self.runs_in == "asyncio" else [result_of(one) for one in returned]


def load_function(
    path: str, name: str, kwargs: Mapping[str, Any], scope: str, runs_in: RunsIn
) -> CustomFunction | CustomBatchFunction:
    """Load the user's function.

    Raises:
        PluginError: the file or function does not exist, or it does not accept the arguments it is called
            with.
        ConfigError: an async function is configured to run elsewhere than in asyncio.
    """
    function = Reference(path, name).load()
    if not callable(function) or inspect.isclass(function):
        what = (
            f"a class ({place(function)}); name it in reward.sources"
            if inspect.isclass(function)
            else f"{function!r}, not a function"
        )
        raise PluginError(f"{path}:{name} is {what}")
    if inspect.iscoroutinefunction(function) and runs_in != "thread":
        raise ConfigError(f"runs_in={runs_in}: {name!r} is async and runs in asyncio; remove the key")
    check_awaited(
        function,
        f"function {name!r} ({place(function)})",
        name,
        is_async=inspect.iscoroutinefunction(function),
    )
    kind = CustomBatchFunction if scope == "batch" else CustomFunction
    _check_takes(function, kind, kwargs)
    return kind(function, kwargs, runs_in)


def _check_takes(
    function: Callable[..., Any], kind: type[CustomFunction | CustomBatchFunction], kwargs: Mapping[str, Any]
) -> None:
    names = [name for name in kind.passes if name != "extra_info" or _takes(function, name)]
    if kind is CustomFunction and _names(function, ENVIRONMENT):
        names.append(ENVIRONMENT)
    try:
        signature = inspect.signature(function)
    except ValueError:  # a compiled function has no signature
        return
    try:
        signature.bind(**{**dict.fromkeys(names), **kwargs})
    except TypeError as error:
        wanted = ", ".join((*kind.passes, *(name for name in kwargs if name not in kind.passes)))
        raise PluginError(
            f"function {function.__name__!r} ({place(function)}) is called as {function.__name__}({wanted}), "
            f"by name: {error}; it takes {signature}"
        ) from error


def result_of(returned: Any) -> RewardResult | None:
    """Convert what a function returned for one attempt.

    Raises:
        RewardError: it is not a finite number, a dict with one, or None. Such a result is never scored as 0.
    """
    value = returned.get("score") if isinstance(returned, Mapping) else returned
    if value is None and (returned is None or "score" in returned):
        return None
    if not is_finite_number(value):
        where = "" if value is returned or value is None else " as `score`"
        raise RewardError(
            f"the custom reward function returned {described(returned if value is None else value)}{where}; "
            "return a finite number, a dict with `score`, or None"
        )
    others = (
        {str(key): other for key, other in returned.items() if key not in ("score", BY_CONVERSATION)}
        if isinstance(returned, Mapping)
        else {}
    )
    metrics = {key: float(other) for key, other in others.items() if is_finite_number(other)}
    if "acc" in metrics:  # verl's name for it
        metrics.setdefault("accuracy", metrics["acc"])
    details = {key: other for key, other in others.items() if key not in metrics}
    return RewardResult(float(value), metrics, details, _by_conversation(returned))


def _by_conversation(returned: Any) -> dict[str, float]:
    """Return the rewards by name of conversation, {} if the function returned none."""
    given = returned.get(BY_CONVERSATION) if isinstance(returned, Mapping) else None
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(map(is_finite_number, given.values())):
        raise RewardError(
            f"the custom reward function returned {BY_CONVERSATION}={described(given)}; return a dict of "
            "conversation name -> finite number"
        )
    return {str(name): float(value) for name, value in given.items()}


def is_finite_number(value: Any) -> TypeGuard[float]:
    """Return whether `value` is a number to learn from. Includes booleans, the scalars of numpy and torch,
    and their arrays without dimensions, which verl accepts as well.
    """
    if type(value) is not float and type(value) is not int:
        if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            value = value.item()
        if not isinstance(value, numbers.Real):  # takes a microsecond
            return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


def described(value: Any) -> str:
    """Return a returned value with its type, and what is wrong with it if that is certain, for a message."""
    if inspect.iscoroutine(value):
        value.close()  # else Python warns that it was never awaited
        return "a coroutine: `await` is missing"
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    is_number = isinstance(value, numbers.Real)
    try:
        shown = repr(value)
    except Exception:  # noqa: BLE001 - boundary: a user's object, or an integer of thousands of digits
        shown = "a value"
    shown = shown if len(shown) <= MAX_SHOWN_CHARS else f"{shown[:MAX_SHOWN_CHARS]}..."
    return f"{shown}, which is not finite" if is_number else f"{shown} of type {name}"


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.name == name or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _names(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter of this name; `**kwargs` do not count."""
    return name in inspect.signature(function).parameters


async def _awaited(returned: Any) -> RewardResult | None:
    return result_of(await returned)


async def _all_awaited(returned: Any) -> list[RewardResult | None]:
    return [result_of(one) for one in await returned]


def _extra_info(attempt: Attempted) -> dict[str, Any]:
    # verl's count: the prompt, each assistant message, and each group of tool results between two of these.
    sides = itertools.groupby(message.role == "assistant" for message in attempt.response)
    facts = {"environment_facts": attempt.facts} if attempt.facts else {}
    return {**attempt.task.extra_info, **facts, "num_turns": 1 + sum(1 for _ in sides)}
