"""The contract of rewards."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

from agentrl.errors import DataError
from agentrl.extras.testing.contracts.running import (
    ODD_TEXTS,
    InEnvironment,
    check_metrics,
    check_name,
    check_number,
    first,
    plugin_class,
    run,
    side_by_side,
)
from agentrl.extras.testing.script import Call
from agentrl.extras.testing.stage import DATA_SOURCE, play
from agentrl.plugins import (
    AnyReward,
    Attempted,
    BatchReward,
    GroupReward,
    Reward,
    RewardResult,
    TurnReward,
    Unreachable,
    load_plugins,
)
from agentrl.plugins.rewards import RunsIn
from agentrl.types import SCORED_OUTCOMES, Message, Outcome, Task, Trajectory

ONLY_FACTS = "rewards in processes, of groups and of batches do not see the environment"


@dataclass(frozen=True, slots=True)
class RewardExample:
    """One finished attempt: the assistant's turns on a row with `ground_truth`.

    `value` is the expected reward. calls: tool, arguments: calls of the environment's tools that were made
    before, in this order.
    """

    says: str | Sequence[str]
    value: float | None
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    prompt: str = "What is the answer?"
    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()

    @property
    def shown(self) -> str:
        return repr(self.turns[-1][:80]) if self.turns else "an attempt without words"

    @property
    def turns(self) -> list[str]:
        return [self.says] if isinstance(self.says, str) else list(self.says)


class RewardContract(InEnvironment):
    """Subclass it as `class TestMyReward(RewardContract)`, with at least `reward` and `examples`.

    reward: a class, a registered name, or `file.py:Class`; of any scope.
    examples: attempts with their expected reward (for a TurnReward: of the last turn; for a group or batch:
        scored alone).
    config: the reward's options, as in `reward.reward_config`.
    bad_rows: fields of a Task (ground_truth, extra_info) that cannot be scored: `check` must raise DataError.
    environment, environment_config, environment_kwargs: those of InEnvironment, if the reward needs one. Each
        example then gets an environment of its own, after its `calls`.
    """

    reward: ClassVar[type[AnyReward] | str]
    examples: ClassVar[Sequence[RewardExample]]
    config: ClassVar[Mapping[str, Any]] = {}
    bad_rows: ClassVar[Sequence[Mapping[str, Any]]] = ()

    def test_name(self) -> None:
        registry = load_plugins().rewards
        check_name(registry, plugin_class(registry, self.reward))

    def test_scope_and_place_are_known(self) -> None:
        cls = self._class()
        reward = self._new()
        assert reward.runs_in in get_args(RunsIn), (
            f"runs_in={reward.runs_in!r}: one of {', '.join(get_args(RunsIn))}"
        )
        is_async = inspect.iscoroutinefunction(cls.score)
        assert is_async == (reward.runs_in in ("asyncio", "trio")), (
            "an async `score` runs in asyncio or trio, any other does not"
        )

    def test_examples_get_what_they_deserve(self) -> None:
        assert self.examples, "give at least one example in `examples`"
        for example, value in zip(self.examples, self._values(self.examples), strict=True):
            self._new().check(task_of(example))
            assert value == example.value, f"{example.shown} got {value}, deserves {example.value}"

    def test_the_same_attempt_gets_the_same_reward(self) -> None:
        both, again = self._values([*self.examples, *self.examples]), self._values(self.examples)
        assert both == [*again, *again], f"the examples got {both}, and then {again}"

    def test_attempts_at_once_do_not_disturb_each_other(self) -> None:
        """One instance can score many attempts concurrently, unless it runs in its own process."""
        if self._new().runs_in != "process":
            examples = [*self.examples] * 4
            assert self._values(examples, at_once=True) == self._values(examples)

    def test_odd_answers_are_scored(self) -> None:
        """Any text of a model gets a number or None.

        An exception would count as an infrastructure failure.
        """
        for name, text in ODD_TEXTS.items():
            example = dataclasses.replace(first(self.examples, "examples"), says=text)
            try:
                (value,) = self._values([example])
            except Exception as error:  # boundary of one check: the plugin raised
                raise AssertionError(f"{name} text raised {type(error).__name__}: {error}") from error
            check_number(value, f"the reward of {name} text")

    def test_an_attempt_without_words_is_scored(self) -> None:
        (value,) = self._values([dataclasses.replace(first(self.examples, "examples"), says=())])
        check_number(value, "the reward of an attempt without an assistant message")

    def test_bad_rows_are_refused_before_anything_is_played(self) -> None:
        for row in self.bad_rows:
            try:
                self._new().check(task_of(RewardExample("", None, **row)))
            except DataError:
                continue
            raise AssertionError(f"`check` took {dict(row)!r}: raise DataError with what is missing")

    def test_one_that_runs_in_a_process_can_be_sent_there(self) -> None:
        reward = self._new()
        if reward.runs_in == "process":
            assert type(pickle.loads(pickle.dumps(reward))) is type(reward)

    def test_in_the_loop_it_lies_on_tokens_that_the_policy_sampled(self) -> None:
        cls = self._class()
        example = first(self.examples, "examples")
        if len(example.turns) != 1 or issubclass(cls, BatchReward):  # `play` computes no batch rewards
            return
        trajectory = self._play(example, cls)
        assert trajectory.outcome in SCORED_OUTCOMES, str(trajectory.failure)
        for event in trajectory.rewards:
            check_number(event.value, f"the reward {event.name}")
            assert trajectory.action_mask[event.position]

    # ------------------------------------------------------------------------------------------------- inside

    def _class(self) -> type[AnyReward]:
        return plugin_class(load_plugins().rewards, self.reward)

    def _new(self) -> AnyReward:
        return self._class()(dict(self.config))

    def _values(self, examples: Sequence[RewardExample], *, at_once: bool = False) -> list[float | None]:
        """Return the rewards that one instance gives to the examples, one after the other or concurrently
        (`at_once`).
        """
        if self.environment is not None:
            return [self._value_in_environment(example) for example in examples]
        return self._scores(self._new(), [attempt_of(example) for example in examples], at_once=at_once)

    def _value_in_environment(self, example: RewardExample) -> float | None:
        """Return the reward of an example whose environment lives, as rewards see it in the loop."""
        seen: list[float | None] = []
        reward = self._new()
        score = self._scores

        class Inside(Reward):
            name: ClassVar[str] = "inside"

            def score(self, attempt: Attempted) -> RewardResult:
                environment = attempt.environment if sees_environment(reward) else Unreachable(ONLY_FACTS)
                subject = dataclasses.replace(
                    attempt_of(example), environment=environment, facts=attempt.facts
                )
                seen.extend(score(reward, [subject], at_once=False))
                return RewardResult(0.0)

        trajectory = self._play(dataclasses.replace(example, says="done"), Inside)
        assert seen, f"{example.shown}: {trajectory.failure}"
        return seen[0]

    def _play(self, example: RewardExample, reward: type[AnyReward]) -> Trajectory:
        """Play an example through the loop."""
        calls = [Call(name, dict(arguments)) for name, arguments in example.calls]
        return play(
            [*calls, *example.turns],
            agent="single_turn_agent" if self.environment is None else "tool_agent",
            reward=reward,
            prompt=example.prompt,
            ground_truth=example.ground_truth,
            extra_info=example.extra_info,
            reward_config={"reward_config": {reward.name: dict(self.config)}},
            max_turns=len(calls) + 1,
            **self._environment_settings(),
        )

    def _scores(self, reward: Any, attempts: Sequence[Attempted], *, at_once: bool) -> list[float | None]:
        is_shared = isinstance(reward, GroupReward | BatchReward)
        scores = [
            functools.partial(reward.score, [attempt] if is_shared else attempt) for attempt in attempts
        ]
        if reward.runs_in not in ("asyncio", "trio"):
            with ThreadPoolExecutor(8 if at_once else 1) as threads:
                returned = list(threads.map(lambda score: score(), scores))
        elif at_once:
            returned = run(reward.runs_in, lambda: side_by_side(reward.runs_in, *scores))
        else:

            async def in_turn() -> list[Any]:
                return [await score() for score in scores]

            returned = run(reward.runs_in, in_turn)
        return [value_of(result, reward, attempt) for result, attempt in zip(returned, attempts, strict=True)]


def sees_environment(reward: AnyReward) -> bool:
    """Return whether a reward runs beside the environment; others get its facts."""
    return reward.runs_in != "process" and not isinstance(reward, GroupReward | BatchReward)


def value_of(returned: Any, reward: AnyReward, attempt: Attempted) -> float | None:
    """Check the types of what `score` returned and return the attempt's reward (for a TurnReward: of the last
    turn).
    """
    if isinstance(reward, TurnReward):
        values = list(returned)
        assert len(values) == attempt.num_turns, f"{len(values)} values for {attempt.num_turns} turns"
        for value in values:
            check_number(value, "a turn's reward")
        return values[-1] if values else None
    if isinstance(reward, GroupReward | BatchReward):
        assert len(returned) == 1, f"{len(returned)} results for one attempt"
        (returned,) = returned
    assert returned is None or isinstance(returned, RewardResult), (
        f"`score` returned {returned!r}; return RewardResult or None"
    )
    if returned is None:
        return None
    check_number(returned.value, "the reward")
    check_metrics(returned.metrics)
    return returned.value


def task_of(example: RewardExample) -> Task:
    """Return the task of an example."""
    return Task(
        task_id="testing:0",
        data_source=DATA_SOURCE,
        messages=(Message("user", example.prompt),),
        agent_name="single_turn_agent",
        ground_truth=example.ground_truth,
        extra_info=dict(example.extra_info),
    )


def attempt_of(example: RewardExample) -> Attempted:
    """Return the finished attempt of an example, with a user message between the turns."""
    task = task_of(example)
    response = [
        message
        for text in example.turns
        for message in (Message("assistant", text), Message("user", "Go on."))
    ][:-1]
    num_tokens = sum(len(text) for text in example.turns)
    return Attempted(
        task=task,
        messages=(*task.messages, *response),
        outcome=Outcome.COMPLETED,
        num_turns=len(example.turns),
        num_response_tokens=num_tokens,
        num_action_tokens=num_tokens,
        max_response_tokens=max(1024, num_tokens),
    )
