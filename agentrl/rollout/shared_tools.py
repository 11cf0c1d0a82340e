"""The state of tools that all attempts of a process share: schemas, limits, circuit breakers and concurrency
slots.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import jsonschema_rs
import trio

from agentrl.config.agent import AgentConfig, ToolLimits
from agentrl.errors import PluginError, ToolError
from agentrl.plugins import Registry, Tool, WrongCall
from agentrl.plugins.blame import RaisedElsewhere, failure_of
from agentrl.plugins.contained import contained
from agentrl.plugins.functions import MethodTool
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.rollout.guests import Guest, GuestTimeout
from agentrl.rollout.shorten import TextCodec, shorten
from agentrl.servers.breaker import CircuitBreaker
from agentrl.types import Failure, JsonObject

MAX_PROBLEM_CHARS = 200
"""Limit on a validator's message, which can quote a whole argument."""
FIRST_RETRY_PAUSE_S = 0.25
MAX_RETRY_PAUSE_S = 8.0


class ToolUnavailable(ToolError):
    """The circuit breaker is open: the call was not tried."""


class SharedTools:
    """One `SharedTool` for each tool offered in this process. Created once and shared by the players."""

    def __init__(
        self, registry: Registry[Tool], config: AgentConfig, *, host: AsyncioHost, codec: TextCodec
    ) -> None:
        self.max_calls_per_turn = config.max_tool_calls_per_turn
        self._registry = registry
        self._config = config
        self._host = host
        self._codec = codec
        self._tools: dict[str, SharedTool] = {}
        self._schemas: dict[tuple[str, ...], list[dict[str, Any]]] = {}

    def get(self, name: str) -> SharedTool:
        """Return the shared state of a tool.

        Raises:
            PluginError: the tool is not registered, or its `parameters` are not a JSON schema.
        """
        if name not in self._tools:
            self._tools[name] = SharedTool(
                name, self._registry, self._config, host=self._host, codec=self._codec
            )
        return self._tools[name]

    def schemas(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the function schemas as the chat template shows them.

        The same names always give the same list object.
        """
        key = tuple(names)
        if key not in self._schemas:
            self._schemas[key] = [self.get(name).schema for name in key]
        return self._schemas[key]

    def fit(self, text: str) -> str:
        """Shorten the answer to a call of an unknown tool to the default output budget."""
        return shorten(text, self._config.max_tool_output_tokens, self._codec)

    @property
    def num_breaker_openings(self) -> int:
        return sum(tool.breaker.num_openings for tool in list(self._tools.values()))


class SharedTool:
    """Shared state of one tool: schema, limits, circuit breaker, and slots for concurrent calls.

    name: for the model. is_method: it is a method of the attempt's environment.
    """

    def __init__(
        self, name: str, registry: Registry[Tool], config: AgentConfig, *, host: AsyncioHost, codec: TextCodec
    ) -> None:
        tool = registry.create(name, config.tool_config)
        self.name = tool.name
        self.is_method = isinstance(tool, MethodTool)
        short = tool.name if self.is_method and tool.name not in registry.names() else name
        limits = config.tool_limits.get(name) or config.tool_limits.get(short, ToolLimits())
        self.limits = limits
        self.timeout_s = limits.timeout_s or config.tool_timeout_s
        self.schema = tool.schema()
        self.parameters: JsonObject = tool.parameters
        self.max_retries = limits.max_retries if tool.is_idempotent else 0
        self.first_failure: Failure | None = None  # since its last success: what the breaker opened for
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
        """Return a tool instance for one attempt and its guest.

        Raises:
            ToolError: the tool's constructor raised.
        """
        try:
            with contained():
                tool = self._create()
        except Exception as error:  # boundary: a plugin's constructor raised
            raise ToolError(
                f"tool {self.name!r} raised in `__init__`: {type(error).__name__}: {error}"
            ) from error
        return tool, Guest(
            tool, f"tool {self.name!r}", start_kwargs, host=self._host, timeout_s=self.timeout_s
        )

    def problem(self, arguments: JsonObject) -> str | None:
        """Return what is wrong with the arguments of a call; None if they are valid."""
        arguments = dict(arguments)
        if self._validator.is_valid(arguments):
            return None
        error = min(self._validator.iter_errors(arguments), key=lambda error: len(error.instance_path))
        where = f"{'.'.join(map(str, error.instance_path))}: " if error.instance_path else ""
        return f"{where}{error.message[:MAX_PROBLEM_CHARS]}"

    def attempt(self) -> _Try:
        """Return a context that passes one try of a call through the circuit breaker and reports its result.

        Raises:
            ToolUnavailable: the breaker is open.
        """
        return _Try(self)

    def pauses(self) -> Iterator[float]:
        """Yield the pause before each retry, in seconds.

        It has jitter, because the attempts of a process fail together.
        """
        for retry in range(self.max_retries):
            yield min(FIRST_RETRY_PAUSE_S * 2**retry, MAX_RETRY_PAUSE_S) * random.uniform(0.5, 1.0)

    def fit(self, text: str) -> str:
        """Shorten the text to the tool's output budget."""
        return shorten(text, self._max_output_tokens, self._codec, keep=self.limits.keep)


class _Try:
    """One try of a call, between the ticket of the circuit breaker and the report of its result.

    A class, because a generator would cost more than a quick call.
    """

    __slots__ = ("_ticket", "_tool")

    def __init__(self, tool: SharedTool) -> None:
        self._tool = tool

    def __enter__(self) -> None:
        ticket = self._tool.breaker.begin(trio.current_time())
        if ticket is None:
            cause = self._tool.first_failure
            assert cause is not None, "a failure opened the breaker"
            raise ToolUnavailable(
                f"tool {self._tool.name!r} is not available, it failed repeatedly: {cause.text}"
            ) from RaisedElsewhere(cause)
        self._ticket = ticket

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        breaker = self._tool.breaker
        if error is None or isinstance(error, WrongCall):
            breaker.succeeded(self._ticket)
            if not breaker.is_open:  # a call that began before it opened may succeed afterwards
                self._tool.first_failure = None
        elif isinstance(error, ToolError) and not isinstance(error, GuestTimeout):
            self._tool.first_failure = self._tool.first_failure or failure_of(error)
            breaker.failed(self._ticket, trio.current_time())
        else:  # a timeout may be the fault of the call, such as an infinite loop
            breaker.abandoned(self._ticket)


def validator(tool: Tool | type[Tool]) -> jsonschema_rs.Validator:
    """Return the validator of a tool's arguments.

    Raises:
        PluginError: the tool's `parameters` are not a JSON schema.
    """
    try:
        return jsonschema_rs.validator_for(dict(tool.parameters))
    except ValueError as error:
        message = getattr(error, "message", str(error))
        raise PluginError(
            f"tool {tool.name!r}: `parameters` is not a JSON schema: {message[:MAX_PROBLEM_CHARS]}"
        ) from error
