"""The tools of one trajectory: calls checked, run side by side, each answered in the order of the calls."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import trio
from jsonschema.exceptions import SchemaError, best_match

from agentrl.config.schema import AgentConfig
from agentrl.errors import PluginError, ToolError
from agentrl.plugins import Registry, Tool, ToolResult
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.rollout.guests import Guest, GuestTimeout
from agentrl.types import JsonObject, ToolCall

MAX_PROBLEM_CHARS = 200
"""A validator's message may quote a whole argument."""


class Toolbox:
    """One instance of each offered tool. A tool starts at its first call and keeps its state until `close`."""

    def __init__(
        self,
        names: Sequence[str],
        registry: Registry[Tool],
        config: AgentConfig,
        *,
        tools_kwargs: Mapping[str, JsonObject],
        host: AsyncioHost,
    ) -> None:
        self._tools = {name: registry.get(name)(config.tool_config.get(name)) for name in names}
        self._guests = {
            name: Guest(
                tool,
                f"tool {name!r}",
                tools_kwargs.get(name, {}).get("create_kwargs", {}),
                host=host,
                timeout_s=config.tool_timeout_s,
            )
            for name, tool in self._tools.items()
        }
        self._max_calls = config.max_tool_calls_per_turn
        self._timeout_s = config.tool_timeout_s

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The function schemas, as the chat template shows them."""
        return [tool.schema() for tool in self._tools.values()]

    async def answer(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run the calls side by side and return one result for each, in order.

        What the model did wrong (unknown tool, wrong arguments, too many or too long calls) is an answer with `is_error`.

        Raises:
            ToolError: a tool itself broke; the other calls are cancelled.
        """
        results: list[ToolResult | None] = [None] * len(calls)
        broken: list[ToolError] = []

        async def run(index: int, call: ToolCall) -> None:
            try:
                results[index] = await self._call(call)
            except ToolError as error:
                broken.append(error)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for index, call in enumerate(calls):
                if index < self._max_calls:
                    nursery.start_soon(run, index, call)
                else:
                    results[index] = _wrong(f"not run: at most {self._max_calls} tool calls per turn")
        if broken:
            raise broken[0]
        return [result for result in results if result is not None]

    async def close(self) -> None:
        """Close every started tool, side by side; never raises."""
        async with trio.open_nursery() as nursery:
            for guest in self._guests.values():
                nursery.start_soon(guest.close)

    async def _call(self, call: ToolCall) -> ToolResult:
        if (problem := self._problem(call)) is not None:
            return _wrong(problem)
        assert call.arguments is not None
        try:
            result = await self._guests[call.name].use(self._tools[call.name].call, call.arguments)
        except GuestTimeout:
            return _wrong(f"timed out after {self._timeout_s:g} s")
        if not isinstance(result, ToolResult):
            raise ToolError(f"tool {call.name!r} returned {type(result).__name__}; return agentrl.plugins.ToolResult")
        return result

    def _problem(self, call: ToolCall) -> str | None:
        """Return what is wrong with the call, for the model to learn from; None when it can be run."""
        tool = self._tools.get(call.name)
        if call.arguments is None:
            return f"not run: {call.error}" + (f"; expected arguments: {_schema_text(tool)}" if tool else "")
        if tool is None:
            return f"not run: unknown tool {call.name!r}; tools: {', '.join(self._tools) or 'none'}"
        error = best_match(validator(type(tool)).iter_errors(dict(call.arguments)))
        if error is None:
            return None
        where = f"{'.'.join(map(str, error.absolute_path))}: " if error.absolute_path else ""
        return f"not run: {where}{error.message[:MAX_PROBLEM_CHARS]}; expected arguments: {_schema_text(tool)}"


@functools.lru_cache(maxsize=1024)
def validator(tool: type[Tool]) -> jsonschema.protocols.Validator:
    """Return the validator of a tool's arguments; raise PluginError when its `parameters` are no JSON schema."""
    schema = dict(tool.parameters)
    cls = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        cls.check_schema(schema)
    except SchemaError as error:
        raise PluginError(f"tool {tool.name!r}: `parameters` is no JSON schema: {error.message[:MAX_PROBLEM_CHARS]}") from error
    return cls(schema)


def _schema_text(tool: Tool) -> str:
    return json.dumps(dict(tool.parameters), ensure_ascii=False, separators=(",", ":"))


def _wrong(text: str) -> ToolResult:
    return ToolResult(text, is_error=True)
