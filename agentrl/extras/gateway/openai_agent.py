"""The agent for external programs: an async function, a function, or a command that uses a URL compatible
with OpenAI's or Anthropic's.

    agent:
      agent_config:
        openai_agent:
          target: my_agent.py:solve            # or package.module:solve; or, instead of a target,
          command: [python, my_agent.py]       # with `env: {NAME: value}` and `pass_env: [NAME]` beside it

The function is called as `solve(task, base_url=..., api_key=..., model=...)`. An async function runs in the
process's asyncio loop, any other in its own thread. `task` is a dictionary with task_id, data_source,
ability, messages (in OpenAI's format) and extra_info; it does not contain the ground truth. A command gets it
as JSON on stdin. The command's environment has OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL, the same for
ANTHROPIC, and the variables of `env`. Of this process's variables it has only those in `pass_env` and a few
that every program needs, so it does not see the keys of servers and trackers.

A function may return rewards: a number, or a dictionary of name -> number. None and texts are not rewards;
the policy's answers are recorded when they are sampled.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import trio
from pydantic import Field, model_validator

from agentrl.errors import DataError, PluginError
from agentrl.extras.hubs.variables import clean_environment
from agentrl.plugins import AgentLoop, OpenAIEndpoint, Reference, Session
from agentrl.plugins.options import Options, read_options
from agentrl.types import JsonObject, Message, Task

STDERR_TAIL_BYTES = 2000
STDERR_GRACE_S = 1.0
"""Seconds to read the rest of stderr after the process group is dead.

A child outside the group may keep the pipe open.
"""


class OpenAIAgentOptions(Options):
    """Options in `agent.agent_config.openai_agent`: exactly one of `target` and `command`.

    For a command, `env` sets variables, and `pass_env` names variables of this process to pass on.
    """

    target: str | None = None
    command: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    pass_env: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _has_one_program(self) -> OpenAIAgentOptions:
        if bool(self.target) == bool(self.command):
            raise ValueError(
                "set either target (file.py:function or module:function) or command (program and arguments)"
            )
        return self


class CommandFailed(Exception):
    """A command ended with a nonzero exit status."""


class OpenAIAgent(AgentLoop):
    """Runs a program that plays the attempt through the gateway. The attempt ends when the program does."""

    name: ClassVar[str] = "openai_agent"
    uses_tools: ClassVar[bool] = False  # the program brings its own

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._options = read_options(OpenAIAgentOptions, self.config, plugin="agent 'openai_agent'")
        self._target = None if self._options.target is None else load_target(self._options.target)
        passed = clean_environment(self._options.pass_env, key="agent.agent_config.openai_agent.pass_env")
        self._environment = passed | self._options.env

    def prompt(self, task: Task, tools: Sequence[JsonObject]) -> Sequence[Message]:
        """Return the messages that the program gets.

        Raises:
            DataError: they contain images, which it does not get.
        """
        if any(message.images for message in task.messages):
            raise DataError(
                f"{task.task_id}: messages contain images, which programs of openai_agent do not get; name "
                "another agent for the row, such as tool_agent"
            )
        return super().prompt(task, tools)

    async def run(self, task: Task, session: Session) -> None:
        async with session.serve_openai() as endpoint:
            if self._target is None:
                await run_command(self._options.command, self._environment, task_view(task), endpoint)
            else:
                result = await call_target(self._target, task_view(task), endpoint, session)
                for name, value in rewards_of(result).items():
                    session.add_reward(name, value)


def load_target(text: str) -> Callable[..., Any]:
    """Return the function named by `file.py:function` or `module:function`.

    Raises:
        PluginError: the function does not exist or is not callable.
    """
    reference = Reference.parse(text)
    if reference is None:
        raise PluginError(
            f"agent.agent_config.openai_agent.target={text!r}: write file.py:function or module:function"
        )
    target = reference.load()
    if not callable(target):
        raise PluginError(
            f"agent.agent_config.openai_agent.target={text!r} is a {type(target).__name__}, not a function"
        )
    return target


async def call_target(
    target: Callable[..., Any], task: dict[str, Any], endpoint: OpenAIEndpoint, session: Session
) -> Any:
    """Call the function and return its result.

    If the attempt is cancelled, a function in a thread is abandoned; its further requests fail.
    """
    call = partial(target, task, base_url=endpoint.base_url, api_key=endpoint.api_key, model=endpoint.model)
    if inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(type(target).__call__):
        return await session.run_asyncio(call)
    # A separate limiter: hundreds of agents wait concurrently, far more than trio's default number of
    # threads.
    return await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1))


async def run_command(
    command: tuple[str, ...], env: Mapping[str, str], task: dict[str, Any], endpoint: OpenAIEndpoint
) -> None:
    """Run the command to its end, with the variables `env` and those of the endpoint, then kill its process
    group.

    Raises:
        CommandFailed: its exit status is not 0; the message holds the end of its stderr.
        PluginError: the command cannot be started.
    """
    variables = {**env, **endpoint.environment}
    try:
        process = await trio.lowlevel.open_process(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=variables,
            start_new_session=True,
        )
    except OSError as error:
        raise PluginError(
            f"agent.agent_config.openai_agent.command={command[0]!r} cannot be started: {error}"
        ) from error
    tail = bytearray()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_feed, process, json.dumps(task, ensure_ascii=False, default=str).encode())
            nursery.start_soon(_read_tail, process, tail)
            status = await process.wait()
            _kill_group(process)  # kills child processes that are still running
            nursery.cancel_scope.deadline = trio.current_time() + STDERR_GRACE_S
    finally:
        if process.returncode is None:
            _kill_group(process)
            with trio.CancelScope(
                shield=True
            ):  # SIGKILL cannot be ignored, so this is quick; it leaves no zombie
                await process.wait()
    if status != 0:
        last_words = " ".join(tail.decode(errors="replace").split())
        raise CommandFailed(f"{command[0]} ended with status {status}: {last_words or 'nothing on stderr'}")


def task_view(task: Task) -> dict[str, Any]:
    """Return the part of a task that a program may see."""
    return {
        "task_id": task.task_id,
        "data_source": task.data_source,
        "ability": task.ability,
        "messages": [_message_view(message) for message in task.messages],
        "extra_info": dict(task.extra_info),
    }


def rewards_of(result: Any) -> dict[str, float]:
    """Return the rewards in the result of an agent function: name -> reward.

    Raises:
        PluginError: `result` is not None, a text, a finite number, or a dictionary of finite numbers.
    """
    if result is None or isinstance(result, str):
        return {}
    named = result if isinstance(result, Mapping) else {"returned": result}
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise PluginError(
                f"the agent returned {type(value).__name__} {str(value)[:80]!r} as {name!r}; return None, a "
                "number or name -> number"
            )
    return {str(name): float(value) for name, value in named.items()}


def _message_view(message: Message) -> dict[str, Any]:
    view: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        functions = [
            {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
            for call in message.tool_calls
        ]
        view["tool_calls"] = [
            {"id": call.id, "type": "function", "function": function}
            for call, function in zip(message.tool_calls, functions, strict=True)
        ]
    if message.tool_call_id is not None:
        view["tool_call_id"] = message.tool_call_id
    return view


async def _feed(process: trio.Process, data: bytes) -> None:
    assert process.stdin is not None
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):  # a program need not read its task
        async with process.stdin:
            await process.stdin.send_all(data)


async def _read_tail(process: trio.Process, tail: bytearray) -> None:
    assert process.stderr is not None
    async with process.stderr:
        async for chunk in process.stderr:
            tail += chunk
            del tail[:-STDERR_TAIL_BYTES]


def _kill_group(process: trio.Process) -> None:
    with suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, for a group of zombies
        os.killpg(process.pid, signal.SIGKILL)
