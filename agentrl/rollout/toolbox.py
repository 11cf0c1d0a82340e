"""The tools of one attempt: checks calls, runs them concurrently, and returns results in the order of the
calls.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import trio

from agentrl.errors import PluginError, ToolError
from agentrl.plugins import Environment, Tool, ToolResult, WrongCall, not_run
from agentrl.plugins.blame import blaming, failure_of, wrong_return
from agentrl.rollout.guests import Guest, GuestTimeout, is_inherited
from agentrl.rollout.scopes import Scope
from agentrl.rollout.shared_tools import SharedTool, SharedTools, ToolUnavailable
from agentrl.types import Failure, JsonObject, PluginId, ToolCall

VERLS_TOOL = "(text, reward, metrics): a tuple is verl's form, for files in agent.verl_tool_config"


class Toolbox:
    """The tools offered in one attempt. A tool is created and started at its first call and keeps its state
    until `close`.

    The calls of a turn run concurrently, except those of the environment's methods, which run one after
    another in the order of the calls.

    num_calls: well-formed calls of each tool.
    metrics: num_tool_retries, num_tool_timeouts, num_tool_failures (calls that failed after all retries
        because the tool was broken), num_cut_outputs (outputs over their budget).
    """

    def __init__(
        self,
        names: Sequence[str],
        tools: SharedTools,
        *,
        tools_kwargs: Mapping[str, JsonObject],
        key: str,
        scope: Scope | None = None,
        survived: list[Failure] | None = None,
        environment: Environment | None = None,
    ) -> None:
        """`names`: registered names. `key`: unique key of the attempt. `scope`: the attempt's scope, in which
        calls open theirs. `environment`: given to the tools.

        `survived`: receives each tool failure that did not end the attempt (the call was retried, the model
            was told, or `close` failed).
        """
        self.schemas: list[dict[str, Any]] = tools.schemas(names)
        """The function schemas as the chat template shows them; shared with other attempts."""
        self.metrics: defaultdict[str, float] = defaultdict(float)
        self.num_calls: Counter[str] = Counter()
        self._names = {tools.get(name).name: name for name in names}  # for the model -> registered
        self._shared = tools
        self._tools_kwargs = tools_kwargs
        self._opened: dict[str, tuple[Tool, Guest]] = {}
        self._key = key
        self._scope = scope or Scope()
        self._survived = survived if survived is not None else []
        self._environment = environment

    def check_names(self, names: Sequence[str]) -> frozenset[str]:
        """Return the names, by which the model knows tools, as a set.

        Raises:
            PluginError: one of them is not offered.
        """
        unknown = [name for name in ([names] if isinstance(names, str) else names) if name not in self._names]
        if unknown or isinstance(names, str):
            raise PluginError(
                f"the agent opens a conversation with tools={names!r}; pass a list of names, of: "
                f"{', '.join(self._names) or 'none, for the attempt offers no tool'}"
            )
        return frozenset(names)

    async def answer(
        self, calls: Sequence[ToolCall], *, only: frozenset[str] | None = None
    ) -> list[ToolResult]:
        """Run the calls concurrently and return one result for each, in order, cut to its output budget.

        `only`: names of the tools that may be called; None: all.

        A mistake of the model (unknown tool, wrong arguments, too many or too long calls) gives a result with
        `is_error`.
        So does a broken tool whose limits say `on_failure: tell`.

        Raises:
            ToolError: a tool is broken; the other calls are cancelled.
        """
        limit = self._shared.max_calls_per_turn
        too_many = [not_run(f"at most {limit} tool calls per turn")] * (len(calls) - limit)
        if len(calls) <= 1 or limit == 1:  # most turns call one tool: avoid a nursery
            return [await self._answer(call, only) for call in calls[:limit]] + too_many
        return await self._answer_side_by_side(calls[:limit], only) + too_many

    async def score(self) -> dict[str, float]:
        """Return the final scores of the started tools that give one: name -> score.

        Raises:
            ToolError: a tool broke.
        """
        scores = {}
        for name, (tool, guest) in list(self._opened.items()):
            if is_inherited(tool.score):
                continue
            with self._scope.open(f"score of tool {name}"), blaming("tool", name):
                scores[name] = await guest.score()
        return {name: score for name, score in scores.items() if score is not None}

    @property
    def has_to_close(self) -> bool:
        return any(guest.has_to_close for _, guest in self._opened.values())

    async def close(self) -> None:
        """Close all started tools concurrently. Never raises."""
        if len(self._opened) <= 1:
            for name in self._opened:
                await self._close(name)
            return
        async with trio.open_nursery() as nursery:
            for name in self._opened:
                nursery.start_soon(self._close, name)

    async def _close(self, name: str) -> None:
        failed = await self._opened[name][1].close()
        if failed is not None:
            self._survived.append(failure_of(failed, otherwise=PluginId("tool", name)))

    async def _answer_side_by_side(
        self, calls: Sequence[ToolCall], only: frozenset[str] | None
    ) -> list[ToolResult]:
        results: dict[int, ToolResult] = {}
        broken: list[ToolError] = []

        async def run(index: int, call: ToolCall) -> None:
            try:
                results[index] = await self._answer(call, only)
            except ToolError as error:
                broken.append(error)
                nursery.cancel_scope.cancel()

        async def run_in_turn(indices: Sequence[int]) -> None:
            for index in indices:
                await run(index, calls[index])

        of_environment = [index for index, call in enumerate(calls) if self._is_method(call)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_in_turn, of_environment)
            for index in sorted({*range(len(calls))}.difference(of_environment)):
                nursery.start_soon(run, index, calls[index])
        if broken:
            raise broken[0]
        return [results[index] for index in range(len(calls))]

    def _is_method(self, call: ToolCall) -> bool:
        return call.name in self._names and self._shared.get(self._names[call.name]).is_method

    async def _answer(self, call: ToolCall, only: frozenset[str] | None) -> ToolResult:
        if call.name not in self._names or (only is not None and call.name not in only):
            known = [name for name in self._names if only is None or name in only]
            problem = (
                call.error
                if call.arguments is None
                else f"unknown tool {call.name!r}; tools: {', '.join(known) or 'none'}"
            )
            result = not_run(str(problem))
            return dataclasses.replace(result, text=self._shared.fit(result.text))
        shared = self._shared.get(self._names[call.name])
        problem = call.error if call.arguments is None else shared.problem(call.arguments)
        if problem is not None or call.arguments is None:
            result = not_run(str(problem), shared.parameters)
        else:
            result = await self._run(shared, call.arguments)
        text = shared.fit(result.text)
        if text == result.text:
            return result
        self.metrics["num_cut_outputs"] += 1
        return dataclasses.replace(result, text=text)

    async def _run(self, shared: SharedTool, arguments: JsonObject) -> ToolResult:
        """Run a well-formed call. An error becomes the result, or ends the trajectory."""
        self.num_calls[shared.name] += 1
        try:
            with blaming("tool", shared.name):
                return await self._call_with_retries(shared, arguments)
        except WrongCall as error:
            return ToolResult(f"error: {error}", is_error=True)
        except GuestTimeout:
            self.metrics["num_tool_timeouts"] += 1
            return ToolResult(f"timed out after {shared.timeout_s:g} s", is_error=True)
        except ToolError as error:
            self.metrics["num_tool_failures"] += 1
            if shared.limits.on_failure == "end":
                raise
            self._survive(shared, error)
            return ToolResult(f"tool {shared.name!r} is not available", is_error=True)

    async def _call_with_retries(self, shared: SharedTool, arguments: JsonObject) -> ToolResult:
        for pause_s in shared.pauses():
            try:
                return await self._try(shared, arguments)
            except (GuestTimeout, ToolUnavailable):
                raise
            except ToolError as error:
                self._survive(shared, error)
                self.metrics["num_tool_retries"] += 1
                await trio.sleep(pause_s)
        return await self._try(shared, arguments)

    def _survive(self, shared: SharedTool, error: ToolError) -> None:
        if not isinstance(
            error, ToolUnavailable
        ):  # the failures that opened the breaker were already recorded
            self._survived.append(failure_of(error, otherwise=PluginId("tool", shared.name)))

    async def _try(self, shared: SharedTool, arguments: JsonObject) -> ToolResult:
        if shared.name not in self._opened:
            row_kwargs = self._tools_kwargs.get(self._names[shared.name], {})
            opened = self._opened[shared.name] = shared.open(row_kwargs.get("create_kwargs", {}))
            tool, _ = opened
            tool.trajectory_key, tool.row_kwargs, tool.environment = self._key, row_kwargs, self._environment
        tool, guest = self._opened[shared.name]
        with self._scope.open(f"tool {shared.name}", doing="waiting for a free slot") as scope:
            async with shared.slots:
                scope.doing = ""
                with shared.attempt():
                    result = await guest.use(tool.call, arguments)
                    if not isinstance(result, ToolResult):
                        verls = isinstance(result, tuple)
                        cure = f"return agentrl.plugins.ToolResult{VERLS_TOOL if verls else ''}"
                        raise wrong_return(f"tool {shared.name!r}", tool.call, result, cure)
                    return result
