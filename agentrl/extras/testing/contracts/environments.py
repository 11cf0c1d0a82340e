"""The contract of environments."""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar

import jsonschema_rs

from agentrl.errors import UserError
from agentrl.extras.testing.contracts.running import (
    cancelled_at_first_wait,
    check_calls,
    check_name,
    hang,
    left_tasks,
    plugin_class,
    recorded,
    run,
)
from agentrl.extras.testing.script import Call
from agentrl.extras.testing.stage import play
from agentrl.plugins import Environment, environment_tools, load_plugins
from agentrl.rewards.select import Unscored
from agentrl.rollout.environment import ENVIRONMENT_FACTS
from agentrl.types import JsonObject, Outcome, Trajectory

VERBS = ("start", "facts", "close")


class EnvironmentContract:
    """Subclass it as `class TestMyEnvironment(EnvironmentContract)`, with at least `environment`.

    environment: a class, a registered name, or `file.py:Class`.
    calls: tool, arguments: calls of its tools that succeed, in this order.
    config: the environment's options, as in `agent.environment_config`.
    environment_kwargs: arguments that a row passes to `start`.
    bad_kwargs: arguments that `start` must refuse with a UserError.
    is_deterministic: whether the same calls get the same answers and lead to the same facts in every attempt.
    """

    environment: ClassVar[type[Environment] | str]
    calls: ClassVar[Sequence[tuple[str, Mapping[str, Any]]]] = ()
    config: ClassVar[Mapping[str, Any]] = {}
    environment_kwargs: ClassVar[Mapping[str, Any]] = {}
    bad_kwargs: ClassVar[Sequence[Mapping[str, Any]]] = ()
    is_deterministic: ClassVar[bool] = True

    # -------------------------------------------------------------------------------------------------- tools

    def test_name(self) -> None:
        registry = load_plugins().environments
        check_name(registry, plugin_class(registry, self.environment))

    def test_its_tools_are_described(self) -> None:
        for name, tool in environment_tools(self._class()).items():
            jsonschema_rs.meta.validate(dict(tool.parameters))
            assert len(tool.description) <= 1024, f"the description of {name!r} is long; every prompt pays it"

    def test_calls_fit_the_schemas(self) -> None:
        tools = environment_tools(self._class())
        assert {name for name, _ in self.calls} == set(tools), (
            "give at least one call of each tool in `calls`"
        )
        for name, arguments in self.calls:
            jsonschema_rs.validate(dict(tools[name].parameters), dict(arguments))

    # -------------------------------------------------------------------------------------------------- state

    def test_facts_are_plain_data(self) -> None:
        async def main(environment: Environment) -> JsonObject:
            return await environment.facts()

        facts = self._live(main)
        assert json.loads(json.dumps(facts, allow_nan=False)) == dict(facts), (
            f"not plain JSON data: {facts!r}"
        )

    def test_state_belongs_to_one_attempt(self) -> None:
        """A second attempt gets the same answers, and ends with the same facts."""
        first, second = self._play(self._class()), self._play(self._class())
        if self.is_deterministic:
            assert self._seen(first) == self._seen(second), (
                "the second attempt depends on the first: keep state in `self`, not in the class"
            )

    def test_rows_that_make_no_sense_are_refused_at_the_start(self) -> None:
        for kwargs in self.bad_kwargs:
            environment = self._new()

            async def start(
                environment: Environment = environment, kwargs: Mapping[str, Any] = kwargs
            ) -> None:
                try:
                    await environment.start(**kwargs)
                finally:
                    await environment.close()

            try:
                run(environment.runtime, start)
                is_refused = False
            except UserError:
                is_refused = True
            assert is_refused, f"`start` took {dict(kwargs)!r}: raise DataError with what is missing"

    # ----------------------------------------------------------------------------------------------- lifetime

    def test_it_can_be_closed_unused(self) -> None:
        async def main(environment: Environment) -> None:
            return None

        self._live(main)

    def test_it_can_be_closed_after_a_start_that_was_cancelled(self) -> None:
        environment = self._new()

        async def main() -> None:
            start = functools.partial(environment.start, **self.environment_kwargs)
            await cancelled_at_first_wait(environment.runtime, start)
            await environment.close()

        run(environment.runtime, main)

    def test_no_task_is_left_behind(self) -> None:
        """What the attempts of a process share may stay after the first of them."""

        async def main() -> int:
            for _ in range(2):
                environment = self._new()
                before = left_tasks() if environment.runtime == "asyncio" else set()
                await environment.start(**self.environment_kwargs)
                await environment.close()
            return len(left_tasks() - before) if environment.runtime == "asyncio" else 0

        left = run(self._class().runtime, main)
        assert left == 0, f"{left} asyncio task(s) still run after `close`: cancel them there"

    # -------------------------------------------------------------------------------------------- in the loop

    def test_in_the_loop_it_is_started_used_and_closed(self) -> None:
        watched, log = self._recorded()
        trajectory = self._play(watched)
        assert trajectory.outcome is Outcome.COMPLETED, str(trajectory.failure)
        answers = [message.content for message in trajectory.messages if message.role == "tool"]
        assert trajectory.metrics["num_tool_errors"] == 0, answers
        check_calls(log, "start", "facts", "close")

    def test_in_the_loop_a_start_past_its_deadline_is_closed_too(self) -> None:
        async def hanging(environment: Environment, **_: Any) -> None:
            await hang(environment)

        watched, log = self._recorded(start=hanging)
        trajectory = self._play(watched, environment_timeout_s=0.05)
        assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR, str(trajectory.failure)
        check_calls(log, "start", "close")
        assert trajectory.num_action_tokens == 0

    def test_in_the_loop_a_failure_is_closed_too(self) -> None:
        async def broken(environment: Environment) -> JsonObject:
            raise RuntimeError("broken on purpose")

        watched, log = self._recorded(facts=broken)
        trajectory = self._play(watched)
        assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR, str(trajectory.failure)
        check_calls(log, "start", "facts", "close")
        assert trajectory.rewards == ()

    # ------------------------------------------------------------------------------------------------- inside

    def _class(self) -> type[Environment]:
        return plugin_class(load_plugins().environments, self.environment)

    def _new(self) -> Environment:
        return self._class()(dict(self.config))

    def _live(self, main: Callable[[Environment], Awaitable[Any]]) -> Any:
        """Run `main(environment)` between `start` and `close`."""
        environment = self._new()

        async def whole() -> Any:
            await environment.start(**self.environment_kwargs)
            try:
                return await main(environment)
            finally:
                await environment.close()

        return run(environment.runtime, whole)

    def _seen(self, trajectory: Trajectory) -> Any:
        """Return the answers of the tools, and the facts."""
        answers = [message.content for message in trajectory.messages if message.role == "tool"]
        return answers, trajectory.extra_info.get(ENVIRONMENT_FACTS)

    def _recorded(self, **behaviour: Any) -> tuple[type[Environment], list[str]]:
        """Return a subclass of the environment that logs its calls, and the log."""
        return recorded(self._class(), VERBS, behaviour)

    def _play(self, environment: type[Environment], **settings: Any) -> Trajectory:
        turns: list[Call | str] = [Call(name, dict(arguments)) for name, arguments in self.calls]
        turns.append("done")
        return play(
            turns,
            environment=environment,
            environment_kwargs=dict(self.environment_kwargs),
            reward=Unscored,
            **{
                "environment_config": {environment.name: dict(self.config)},
                "max_turns": len(turns) + 1,
                **settings,
            },
        )
