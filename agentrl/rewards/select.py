"""Which reward scores which row: the table by data source, or the user's own function."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeGuard

from agentrl.config.schema import CustomFunctionConfig, RewardConfig
from agentrl.errors import DataError, PluginError, RewardError
from agentrl.plugins import AnyReward, Attempted, Plugins, Reward, RewardResult, import_source
from agentrl.types import Task


class CustomFunction(Reward):
    """The user's `compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)`, sync or async.

    It returns a number, or a dict with `score`, whose other numbers become metrics. `solution_str` is the text of all
    messages after the prompt, joined by line breaks.
    """

    name: ClassVar[str] = "custom"

    def __init__(self, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self._function = function
        self._kwargs = dict(kwargs)
        self.is_async = inspect.iscoroutinefunction(function)

    def score(self, attempt: Attempted) -> RewardResult:
        return _as_result(self._function(**self._arguments(attempt)))

    async def score_async(self, attempt: Attempted) -> RewardResult:
        """Score with an async function; runs under asyncio."""
        return _as_result(await self._function(**self._arguments(attempt)))

    def _arguments(self, attempt: Attempted) -> dict[str, Any]:
        task, messages = attempt.task, attempt.messages
        return {
            "data_source": task.data_source,
            "solution_str": "\n".join(message.content for message in messages[len(task.messages) :]),
            "ground_truth": task.ground_truth,
            "extra_info": dict(task.extra_info),
            **self._kwargs,
        }


class RewardTable:
    """Chooses the reward of a task. Rewards are made once and score from several threads."""

    def __init__(self, config: RewardConfig, plugins: Plugins) -> None:
        """Load the custom function, or look up every reward of the table.

        Raises:
            PluginError: a reward or the function is unknown, or its file fails to import.
        """
        self._custom = load_function(config.custom_function) if config.custom_function.path else None
        for name in config.reward_config:
            plugins.rewards.resolve(name)
        names = {source: plugins.rewards.resolve(name) for source, name in config.sources.items()} if self._custom is None else {}
        rewards = {name: plugins.rewards.get(name)(config.reward_config.get(name)) for name in set(names.values())}
        self._by_source: dict[str, AnyReward] = {source: rewards[name] for source, name in names.items()}

    def select(self, task: Task) -> AnyReward:
        """Return the task's reward.

        Raises:
            DataError: no reward is known for its data source.
        """
        if self._custom is not None:
            return self._custom
        if task.data_source not in self._by_source:
            raise DataError(
                f"task {task.task_id}: no reward for data_source {task.data_source!r}; known: {', '.join(sorted(self._by_source))} "
                "(add it to reward.sources, or set reward.custom_function.path)"
            )
        return self._by_source[task.data_source]

    def check(self, task: Task) -> None:
        """Raise DataError when the task cannot be scored: unknown source, missing ground truth. Called before any rollout."""
        self.select(task).check(task)


def load_function(config: CustomFunctionConfig) -> CustomFunction:
    """Load the user's reward function.

    Raises:
        PluginError: the file or the function in it does not exist.
    """
    assert config.path is not None
    function = getattr(import_source(config.path), config.name, None)
    if not callable(function):
        raise PluginError(f"reward.custom_function: {config.path} has no function {config.name!r}")
    return CustomFunction(function, config.kwargs)


def _as_result(returned: Any) -> RewardResult:
    """Read what a custom function returned; a number that is none is an error, never a zero."""
    value = returned.get("score") if isinstance(returned, Mapping) else returned
    if not _is_finite_number(value):
        raise RewardError(f"the custom reward function returned {str(returned)[:120]!r}; return a finite number, or a dict with `score`")
    others = returned.items() if isinstance(returned, Mapping) else ()
    return RewardResult(float(value), {str(k): float(v) for k, v in others if k != "score" and _is_finite_number(v)})


def _is_finite_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, numbers.Real) and math.isfinite(value)
