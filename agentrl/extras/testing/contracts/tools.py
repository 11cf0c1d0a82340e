"""The contract of tools."""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import jsonschema_rs

from agentrl.errors import ToolError
from agentrl.extras.testing.contracts.running import (
    InEnvironment,
    cancelled_at_first_wait,
    check_calls,
    check_name,
    first,
    hang,
    left_tasks,
    plugin_class,
    recorded,
    run,
    side_by_side,
)
from agentrl.extras.testing.script import Call
from agentrl.extras.testing.stage import play
from agentrl.plugins import Tool, ToolResult, load_plugins
from agentrl.types import Outcome, Trajectory

T = TypeVar("T")
Arguments = Mapping[str, Any]

ODD_VALUES: tuple[Any, ...] = ({"odd": []}, [{}], None, "odd", -1.5)
"""Values of various JSON types. Any schema that requires a type rejects at least one of them."""


class ToolContract(InEnvironment):
    """Subclass it as `class TestMyTool(ToolContract)`, with at least `tool` and `valid_calls`.

    tool: a class, a typed function, a registered name, or `file.py:Class`.
    valid_calls: arguments of calls that succeed, in an order in which one attempt can make them.
    config: the tool's options, as in `agent.tool_config`.
    create_kwargs: arguments that a row passes to `start`.
    is_deterministic: whether the same calls get the same answers in every attempt.
    environment, environment_config, environment_kwargs: those of InEnvironment, if the tool needs one.
    """

    tool: ClassVar[type[Tool] | Callable[..., Any] | str]
    valid_calls: ClassVar[Sequence[Arguments]]
    config: ClassVar[Mapping[str, Any]] = {}
    create_kwargs: ClassVar[Mapping[str, Any]] = {}
    is_deterministic: ClassVar[bool] = True

    # ----------------------------------------------------------------------------------- what the model reads

    def test_name_and_description(self) -> None:
        registry = load_plugins().tools
        cls = plugin_class(registry, vars_of(type(self), "tool"))
        check_name(registry, cls)
        assert cls.description.strip(), "the description is empty: it is what the model chooses the tool by"
        assert len(cls.description) <= 1024, (
            f"the description has {len(cls.description)} characters; every prompt pays for it"
        )

    def test_parameters_are_a_json_schema_of_an_object(self) -> None:
        parameters = dict(self._class().parameters)
        try:
            jsonschema_rs.meta.validate(parameters)
        except jsonschema_rs.ValidationError as error:
            raise AssertionError(f"`parameters` is no JSON schema: {error.message}") from error
        assert parameters.get("type") == "object", 'the arguments are an object: "type": "object"'
        unknown = set(parameters.get("required", ())) - set(parameters.get("properties", {}))
        assert not unknown, f"required, but not among the properties: {sorted(unknown)}"

    def test_schema_says_what_the_class_says(self) -> None:
        tool = self._new()
        schema = tool.schema()
        assert json.loads(json.dumps(schema)) == schema, "the schema is not plain JSON"
        function = schema["function"]
        assert (function["name"], function["description"]) == (tool.name, tool.description)
        assert function["parameters"] == dict(tool.parameters)

    def test_valid_calls_fit_the_schema(self) -> None:
        assert self.valid_calls, "give at least one example in `valid_calls`"
        for arguments in self.valid_calls:
            jsonschema_rs.validate(dict(self._class().parameters), dict(arguments))

    # -------------------------------------------------------------------------------------------------- calls

    def test_calls_return_results(self) -> None:
        for result in self._answers():
            check_result(result)
            assert not result.is_error, f"a valid call was answered as wrong: {result.text}"

    def test_calls_side_by_side_return_results(self) -> None:
        async def main(tool: Tool) -> list[ToolResult]:
            calls = [
                functools.partial(tool.call, arguments)
                for arguments in [*self.valid_calls, *self.valid_calls]
            ]
            return await side_by_side(tool.runtime, *calls)

        for result in self._live(main):
            check_result(result)

    def test_state_belongs_to_one_trajectory(self) -> None:
        """Two concurrent attempts each get the same answers as alone."""
        alone = self._texts(self._answers())

        tools = [self._new(), self._new()]

        async def both() -> list[list[ToolResult]]:
            return await side_by_side(
                tools[0].runtime, *(functools.partial(self._started, tool, self._call_all) for tool in tools)
            )

        for results in run(tools[0].runtime, both):
            assert self._texts(results) == alone, (
                "the answers depend on another trajectory: keep state in `self`, not in the class"
            )

    def test_the_arguments_are_left_as_they_are(self) -> None:
        before = json.dumps([dict(arguments) for arguments in self.valid_calls])
        self._answers()
        assert json.dumps([dict(arguments) for arguments in self.valid_calls]) == before, (
            "`call` changed its arguments"
        )

    # ----------------------------------------------------------------------------------------------- lifetime

    def test_it_can_be_closed_unused(self) -> None:
        async def main(tool: Tool) -> None:
            return None

        watched, log = self._recorded()
        self._live(main, watched)
        check_calls(log, "start", "close")

    def test_it_can_be_cancelled_and_closed(self) -> None:
        """If a deadline passes during a call, the call ends at its next wait, and `close` still works."""
        example = first(self.valid_calls, "valid_calls")

        async def main(tool: Tool) -> None:
            await cancelled_at_first_wait(tool.runtime, functools.partial(tool.call, example))

        watched, log = self._recorded()
        self._live(main, watched)
        check_calls(log, "start", "call", "close")

    def test_no_task_is_left_behind(self) -> None:
        async def main() -> int:
            tool = self._new()
            await self._started(tool, self._call_all)
            return len(left_tasks()) if tool.runtime == "asyncio" else 0

        left = run(self._class().runtime, main)
        assert left == 0, (
            f"{left} asyncio task(s) still run after `close`: keep them in the tool, and cancel them there"
        )

    # -------------------------------------------------------------------------------------------- in the loop

    def test_in_the_loop_it_is_started_called_and_closed(self) -> None:
        watched, log = self._recorded()
        trajectory = self._play([*self._calls(), "done"], watched)
        assert trajectory.outcome is Outcome.COMPLETED, str(trajectory.failure)
        assert trajectory.metrics["num_tool_errors"] == 0, [
            m.content for m in trajectory.messages if m.role == "tool"
        ]
        check_calls(log, "start", *["call"] * len(self.valid_calls), "close")

    def test_in_the_loop_wrong_arguments_never_reach_call(self) -> None:
        wrong = self._wrong_calls()
        watched, log = self._recorded()
        trajectory = self._play(
            [*(Call(watched.name, dict(arguments)) for arguments in wrong), "done"], watched
        )
        assert trajectory.outcome is Outcome.COMPLETED, str(trajectory.failure)
        assert trajectory.metrics["num_tool_errors"] == len(wrong)
        assert "call" not in log

    def test_in_the_loop_a_broken_call_is_closed_too(self) -> None:
        async def broken(tool: Tool, arguments: Arguments) -> ToolResult:
            raise ToolError("broken on purpose")

        watched, log = self._recorded(broken)
        trajectory = self._play([*self._calls(), "done"], watched)
        assert trajectory.outcome is Outcome.TOOL_ERROR
        check_calls(log, "start", "call", "close")

    def test_in_the_loop_a_call_past_its_deadline_is_closed_too(self) -> None:
        hanging, log = self._recorded(hang)
        trajectory = self._play([*self._calls()[:1], "done"], hanging, tool_timeout_s=0.05)
        assert trajectory.outcome is Outcome.COMPLETED, str(trajectory.failure)
        assert trajectory.metrics["num_tool_errors"] == 1
        check_calls(log, "start", "call", "close")

    # ------------------------------------------------------------------------------------------------- inside

    def _class(self) -> type[Tool]:
        return plugin_class(load_plugins().tools, vars_of(type(self), "tool"))

    def _new(self) -> Tool:
        return self._class()(dict(self.config))

    def _live(self, main: Callable[[Tool], Awaitable[Any]], tool_class: type[Tool] | None = None) -> Any:
        """Run `main(tool)` between `start` and `close`."""
        tool = (tool_class or self._class())(dict(self.config))

        return run(tool.runtime, functools.partial(self._started, tool, main))

    async def _started(self, tool: Tool, main: Callable[[Tool], Awaitable[T]]) -> T:
        """Return `main(tool)`, between `start` and `close`."""
        async with self._in_environment(tool):
            try:
                await tool.start(**self.create_kwargs)
                return await main(tool)
            finally:
                await tool.close()

    async def _call_all(self, tool: Tool) -> list[ToolResult]:
        return [await tool.call(arguments) for arguments in self.valid_calls]

    def _answers(self) -> list[ToolResult]:
        return self._live(self._call_all)

    def _texts(self, results: Sequence[ToolResult]) -> list[str]:
        return [result.text if self.is_deterministic else "" for result in results]

    def _calls(self) -> list[Call]:
        first(self.valid_calls, "valid_calls")
        return [Call(self._class().name, dict(arguments)) for arguments in self.valid_calls]

    def _recorded(
        self, behaviour: Callable[[Tool, Arguments], Awaitable[ToolResult]] | None = None
    ) -> tuple[type[Tool], list[str]]:
        """Return a subclass of the tool that logs its calls, and the log. `behaviour` replaces its calls."""
        replaced = {} if behaviour is None else {"call": behaviour}
        return recorded(self._class(), ("start", "call", "close"), replaced, is_idempotent=False)

    def _play(self, turns: Sequence[Any], tool: type[Tool], **settings: Any) -> Trajectory:
        return play(
            turns,
            tools=[tool],
            tools_kwargs={tool.name: {"create_kwargs": dict(self.create_kwargs)}},
            **{
                **self._environment_settings(),
                "tool_config": {tool.name: dict(self.config)},
                "max_turns": len(turns) + 1,
                **settings,
            },
        )

    def _wrong_calls(self) -> list[Arguments]:
        """Return arguments that the schema rejects: a missing property, a wrong type, or an extra
        property.
        """
        example = dict(first(self.valid_calls, "valid_calls"))
        schema = dict(self._class().parameters)
        candidates: list[Arguments] = [{k: v for k, v in example.items() if k != name} for name in example]
        candidates += [{**example, name: odd} for name in example for odd in ODD_VALUES]
        candidates += [{**example, "no_such_parameter": 1}]
        refused = [arguments for arguments in candidates if not is_valid(arguments, schema)]
        assert refused, (
            "the schema refuses nothing: say which properties are required, and of which type they are"
        )
        return refused


def vars_of(cls: type, attribute: str) -> Any:
    """Return a class attribute without binding: a function stays a function and does not become a method."""
    for base in cls.__mro__:
        if attribute in vars(base):
            value = vars(base)[attribute]
            return value.__func__ if isinstance(value, staticmethod) else value
    raise AssertionError(f"{cls.__name__} needs the attribute `{attribute}`")


def is_valid(arguments: Arguments, schema: Mapping[str, Any]) -> bool:
    return jsonschema_rs.is_valid(dict(schema), dict(arguments))


def check_result(result: Any) -> None:
    """Assert that a call returned a ToolResult, which checks its own fields."""
    assert isinstance(result, ToolResult), (
        f"`call` returned {type(result).__name__}; return agentrl.plugins.ToolResult"
    )
