"""What all trajectories of a process share of the tools: schemas, limits, and who is allowed to call right now."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from typing import Any

import jsonschema_rs
import trio

from agentrl.config.agent import AgentConfig, ToolLimits
from agentrl.errors import PluginError, ToolError
from agentrl.plugins import Registry, Tool, WrongCall
from agentrl.plugins.contained import contained
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.rollout.breaker import CircuitBreaker
from agentrl.rollout.guests import Guest, GuestTimeout
from agentrl.rollout.shorten import TextCodec, shorten
from agentrl.types import JsonObject

MAX_PROBLEM_CHARS = 200
"""A validator's message may quote a whole argument."""
FIRST_RETRY_PAUSE_S = 0.25
MAX_RETRY_PAUSE_S = 8.0


class ToolUnavailable(ToolError):
    """The circuit breaker is open: the call was not tried."""


class SharedTools:
    """One `SharedTool` for each tool that was offered in this process; built once, beside the players."""

    def __init__(self, registry: Registry[Tool], config: AgentConfig, *, host: AsyncioHost, codec: TextCodec) -> None:
        self.max_calls_per_turn = config.max_tool_calls_per_turn
        self._registry = registry
        self._config = config
        self._host = host
        self._codec = codec
        self._tools: dict[str, SharedTool] = {}
        self._schemas: dict[tuple[str, ...], list[dict[str, Any]]] = {}

    def get(self, name: str) -> SharedTool:
        """Return what is shared of a tool.

        Raises:
            PluginError: it is not registered, or its `parameters` are no JSON schema.
        """
        if name not in self._tools:
            self._tools[name] = SharedTool(name, self._registry, self._config, host=self._host, codec=self._codec)
        return self._tools[name]

    def schemas(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the function schemas as the chat template shows them, always the same list for the same names."""
        key = tuple(names)
        if key not in self._schemas:
            self._schemas[key] = [self.get(name).schema for name in key]
        return self._schemas[key]

    def fit(self, text: str) -> str:
        """Return the answer to a call of no tool within the budget of all tools' output."""
        return shorten(text, self._config.max_tool_output_tokens, self._codec)

    @property
    def num_breaker_openings(self) -> int:
        return sum(tool.breaker.num_openings for tool in list(self._tools.values()))


class SharedTool:
    """One tool: its schema, its limits, its circuit breaker, and the slots of its calls."""

    def __init__(self, name: str, registry: Registry[Tool], config: AgentConfig, *, host: AsyncioHost, codec: TextCodec) -> None:
        limits = config.tool_limits.get(name, ToolLimits())
        tool = registry.create(name, config.tool_config)
        self.name = name
        self.limits = limits
        self.timeout_s = limits.timeout_s or config.tool_timeout_s
        self.schema = tool.schema()
        self.parameters: JsonObject = tool.parameters
        self.max_retries = limits.max_retries if tool.is_idempotent else 0
        self.breaker = CircuitBreaker(max_failures=limits.breaker_failures, pause_s=limits.breaker_pause_s)
        self.slots: AbstractAsyncContextManager[Any] = nullcontext()
        if limits.max_concurrent is not None:
            self.slots = trio.CapacityLimiter(limits.max_concurrent)
        self._create = functools.partial(registry.create, name, config.tool_config)
        self._validator = validator(tool)
        self._host = host
        self._codec = codec
        self._max_output_tokens = limits.max_output_tokens or config.max_tool_output_tokens

    def open(self, start_kwargs: JsonObject) -> tuple[Tool, Guest]:
        """Return an instance for one trajectory, and its guest; raise ToolError if its constructor raises."""
        try:
            with contained():
                tool = self._create()
        except Exception as error:  # boundary: a plugin's constructor raised
            raise ToolError(f"tool {self.name!r} raised in `__init__`: {type(error).__name__}: {error}") from error
        return tool, Guest(tool, f"tool {self.name!r}", start_kwargs, host=self._host, timeout_s=self.timeout_s)

    def problem(self, arguments: JsonObject) -> str | None:
        """Return what is wrong with the arguments of a call, None when it can be run."""
        arguments = dict(arguments)
        if self._validator.is_valid(arguments):
            return None
        error = min(self._validator.iter_errors(arguments), key=lambda error: len(error.instance_path))
        where = f"{'.'.join(map(str, error.instance_path))}: " if error.instance_path else ""
        return f"{where}{error.message[:MAX_PROBLEM_CHARS]}"

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Let one try of a call pass the circuit breaker, and tell it how the try ended.

        Raises:
            ToolUnavailable: the breaker is open.
        """
        ticket = self.breaker.begin(trio.current_time())
        if ticket is None:
            raise ToolUnavailable(f"tool {self.name!r} is not available: it broke again and again")
        tell = self.breaker.abandoned
        try:
            yield
            tell = self.breaker.succeeded
        except WrongCall:
            tell = self.breaker.succeeded
            raise
        except GuestTimeout:  # may be the fault of the call: a loop without end
            raise
        except ToolError:
            tell = functools.partial(self.breaker.failed, now=trio.current_time())
            raise
        finally:
            tell(ticket)

    def pauses(self) -> Iterator[float]:
        """Yield the seconds before each further try; spread, because the trajectories of a process fail together."""
        for retry in range(self.max_retries):
            yield min(FIRST_RETRY_PAUSE_S * 2**retry, MAX_RETRY_PAUSE_S) * random.uniform(0.5, 1.0)

    def fit(self, text: str) -> str:
        """Return the text within the output budget."""
        return shorten(text, self._max_output_tokens, self._codec, keep=self.limits.keep)


def validator(tool: Tool | type[Tool]) -> jsonschema_rs.Validator:
    """Return the validator of a tool's arguments; raise PluginError when its `parameters` are no JSON schema."""
    try:
        return jsonschema_rs.validator_for(dict(tool.parameters))
    except ValueError as error:
        message = getattr(error, "message", str(error))
        raise PluginError(f"tool {tool.name!r}: `parameters` is no JSON schema: {message[:MAX_PROBLEM_CHARS]}") from error
