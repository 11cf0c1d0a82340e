"""A hub process with environments of verifiers: their tasks, and rollouts in which the policy is behind an
OpenAI-compatible URL.

Two generations of the package have nothing in common but the name: `load_environment` (up to 0.1) and
tasksets with harnesses (`verifiers.v1`, from 0.4 on).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

from agentrl_hub import Refused, serve  # type: ignore[import-not-found]  # beside this file, where it runs

try:
    from verifiers.v1.utils.loaders import (  # type: ignore[import-not-found]
        load_environment as load_v1,
    )
    from verifiers.v1.utils.loaders import resolve_env_config
except ImportError:
    load_v1 = resolve_env_config = None

MAX_ERROR_CHARS = 500
EMPTY_TURN = "empty_turn"
"""Why a rollout stopped, beside the reasons of the package."""

_numbers = itertools.count()


@contextmanager
def key_variable(api_key: str) -> Iterator[str]:
    """Yield the name of a variable with an attempt's key: verifiers reads keys from variables."""
    name = f"AGENTRL_ATTEMPT_KEY_{next(_numbers)}"
    os.environ[name] = api_key
    try:
        yield name
    finally:
        del os.environ[name]


class Tasksets:
    """An environment of `verifiers.v1`: a taskset, and the seat in which the policy plays it."""

    def __init__(self, name: str, arguments: dict[str, Any], seat: dict[str, Any]) -> None:
        agent = {"harness": {"id": "agentrl_chat"}, "runtime": {"type": "subprocess"}, **seat}
        config = resolve_env_config({"taskset": {"id": name, **arguments}, "agent": agent})
        self._env = load_v1(config)
        self._stack = AsyncExitStack()

    async def open(self) -> None:
        await self._stack.enter_async_context(self._env.serving())

    async def close(self) -> None:
        await self._stack.aclose()

    def tasks(self, count: int) -> list[dict[str, Any]]:
        made = []
        for task in self._env.taskset.take(count):
            data = task.data.model_dump(mode="json")
            made.append({"task": data, "prompt": _messages(data.get("prompt"), data.get("system_prompt"))})
        return made

    async def play(self, task: dict[str, Any], base_url: str, api_key: str, model: str) -> dict[str, Any]:
        from verifiers.v1.clients import EvalClientConfig, ModelContext  # type: ignore[import-not-found]

        task_type = type(self._env.taskset).task_type()
        made = task_type(task_type.data_type().model_validate(task), self._env.config.taskset.task)
        with key_variable(api_key) as variable:
            client = EvalClientConfig(base_url=base_url, api_key_var=variable)
            episode = await self._env.run_episode(made, ModelContext(model=model, client=client))
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        errors = [error.message for error in (*episode.errors, *(e for t in traces for e in t.errors))]
        if not episode.ok or len(traces) != 1:
            why = errors[-1] if errors else f"the episode has {len(traces)} seats that are trained"
            return {"error": why[:MAX_ERROR_CHARS]}
        (trace,) = traces
        metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
        rewards = {name: reward.score for name, reward in trace.rewards.items()}
        return {"reward": trace.reward, "metrics": {**metrics, **rewards}, "stop": trace.stop_condition}


class Environments:
    """An environment of the packages up to 0.1, made by `load_environment`."""

    def __init__(self, name: str, arguments: dict[str, Any], seat: dict[str, Any]) -> None:
        import verifiers  # type: ignore[import-not-found]

        if seat:
            raise Refused("`seat` is for environments of verifiers.v1; leave it out")
        self._env = verifiers.load_environment(name, **arguments)
        rubric = self._env.rubric
        self.is_grouped = any(rubric._is_group_func(function) for function in rubric._get_reward_funcs())
        if self.is_grouped:
            self._env.set_score_rollouts(False)

    async def open(self) -> None:
        return

    async def close(self) -> None:
        return

    def tasks(self, count: int) -> list[dict[str, Any]]:
        dataset = self._env.get_dataset()
        made = []
        for row in itertools.islice(dataset, count):
            row = json.loads(json.dumps(row, default=str))
            made.append({"task": row, "prompt": _messages(row.get("prompt"), None)})
        return made

    async def play(self, task: dict[str, Any], base_url: str, api_key: str, model: str) -> dict[str, Any]:
        from verifiers.types import ClientConfig  # type: ignore[import-not-found]

        with key_variable(api_key) as variable:
            client = ClientConfig(api_base_url=base_url, api_key_var=variable, max_retries=0)
            output = await self._env.run_rollout(task, client, model, {}, max_retries=0)
        if error := output.get("error"):
            if not _is_empty_turn(error):
                return {"error": str(error)[:MAX_ERROR_CHARS]}
            # What the policy says is no failure, and functions of a group look at the last message.
            said = [*(output.get("completion") or []), {"role": "assistant", "content": ""}]
            output |= {"reward": 0.0, "stop_condition": EMPTY_TURN, "completion": said}
        if self.is_grouped:
            rollout = {name: output.get(name) for name in ("completion", "stop_condition", "is_truncated")}
            kept = json.loads(json.dumps({"input": task, **rollout}, default=_plain))
            return {"reward": 0.0, "metrics": {}, "stop": output.get("stop_condition"), "rollout": kept}
        metrics = {name: float(value) for name, value in (output.get("metrics") or {}).items()}
        return {"reward": output["reward"], "metrics": metrics, "stop": output.get("stop_condition")}

    async def score(self, rollouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Score the rollouts of a group together."""
        from verifiers.types import State

        states = []
        for rollout in rollouts:
            state = State(input=dict(rollout["input"]), trajectory=[], metrics={}, reward=0.0)
            for name in ("stop_condition", "is_truncated"):
                state[name] = rollout[name]
            state["prompt"] = _of_package(rollout["input"].get("prompt"))
            state["completion"] = _of_package(rollout["completion"])
            states.append(state)
        await self._env.rubric.score_group(states)
        return [{"reward": float(state["reward"]), "metrics": dict(state["metrics"])} for state in states]


def _is_empty_turn(error: Any) -> bool:
    """Return whether an error of a rollout says that the policy said nothing."""
    return isinstance(error, dict) and str(error.get("error")).endswith("EmptyModelResponseError")


def _of_package(messages: Any) -> Any:
    """Return messages in the classes of the package, if its version has any."""
    try:
        from verifiers.utils.message_utils import normalize_messages  # type: ignore[import-not-found]
    except ImportError:
        return messages
    return normalize_messages(messages) if isinstance(messages, list) else messages


def _plain(value: Any) -> Any:
    return value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else str(value)


Opened = Tasksets | Environments

_OPENED: dict[str, asyncio.Task[Opened]] = {}


async def tasks(environment: str, arguments: dict[str, Any], seat: dict[str, Any], count: int) -> Any:
    """Return the first tasks: the data that `play` needs, and the prompt as messages."""
    opened = await _opened(environment, arguments, seat)
    return await asyncio.to_thread(opened.tasks, count)


async def play(
    environment: str,
    arguments: dict[str, Any],
    seat: dict[str, Any],
    task: dict[str, Any],
    base_url: str,
    api_key: str,
    model: str,
) -> Any:
    """Play a task and return reward, metrics and why it stopped; or `error`: the rollout failed."""
    opened = await _opened(environment, arguments, seat)
    played = await opened.play(task, base_url, api_key, model)
    if "reward" in played and not math.isfinite(played["reward"]):
        raise ValueError(f"the environment gave the reward {played['reward']}")
    played["metrics"] = {k: v for k, v in played.get("metrics", {}).items() if math.isfinite(v)}
    return played


async def score(
    environment: str, arguments: dict[str, Any], seat: dict[str, Any], rollouts: list[dict[str, Any]]
) -> Any:
    """Return reward and metrics of each rollout of a group that is scored together."""
    opened = await _opened(environment, arguments, seat)
    if not isinstance(opened, Environments):
        raise Refused(f"environment {environment!r} does not score a group together")
    scored = await opened.score(rollouts)
    for one in scored:
        if not math.isfinite(one["reward"]):
            raise ValueError(f"the environment gave the reward {one['reward']}")
        one["metrics"] = {k: float(v) for k, v in one["metrics"].items() if math.isfinite(v)}
    return scored


async def _opened(environment: str, arguments: dict[str, Any], seat: dict[str, Any]) -> Opened:
    """Return the environment; it is opened once and shared by all attempts."""
    key = json.dumps([environment, arguments, seat], sort_keys=True)
    if key not in _OPENED or (_OPENED[key].done() and _OPENED[key].exception() is not None):
        _OPENED[key] = asyncio.create_task(_open(environment, arguments, seat))
    return await asyncio.shield(_OPENED[key])


async def _open(environment: str, arguments: dict[str, Any], seat: dict[str, Any]) -> Opened:
    opened: Opened
    try:
        # In the main thread: `load_environment` sets signal handlers.
        if load_v1 is None:
            opened = Environments(environment, arguments, seat)
        else:
            opened = Tasksets(environment, arguments, seat)
    except ModuleNotFoundError as error:
        raise Refused(f"environment {environment!r} cannot be imported: {error}") from error
    except (TypeError, ValueError) as error:
        raise Refused(f"environment {environment!r} refuses {json.dumps(arguments)}: {error}") from error
    await opened.open()
    return opened


def _messages(prompt: Any, system: str | None) -> list[dict[str, str]]:
    """Return a prompt as messages with texts; other content is left out."""
    first = [] if not system else [{"role": "system", "content": system}]
    if isinstance(prompt, str):
        return [*first, {"role": "user", "content": prompt}]
    rest = [
        {"role": message["role"], "content": message["content"]}
        for message in prompt or []
        if isinstance(message.get("content"), str)
    ]
    return [*first, *rest]


serve({"tasks": tasks, "play": play, "score": score})
