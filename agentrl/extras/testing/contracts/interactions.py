"""The contract of interactions."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from agentrl.errors import ToolError, UserError
from agentrl.extras.testing.contracts.running import (
    ODD_TEXTS,
    InEnvironment,
    cancelled_at_first_wait,
    check_calls,
    check_name,
    check_number,
    first,
    hang,
    left_tasks,
    plugin_class,
    recorded,
    run,
    side_by_side,
)
from agentrl.extras.testing.stage import play
from agentrl.plugins import Interaction, InteractionReply, load_plugins
from agentrl.types import SCORED_OUTCOMES, Message, Outcome, ToolCall, Trajectory

T = TypeVar("T")


class InteractionContract(InEnvironment):
    """Subclass it as `class TestMyPartner(InteractionContract)`, with at least `interaction` and `says`.

    interaction: a class, a registered name, or `file.py:Class`.
    says: the assistant's turns in a typical conversation; the partner may be done earlier.
    config: the partner's options, as in `agent.interaction_config`.
    interaction_kwargs: arguments that a row passes to `start`.
    bad_kwargs: arguments that `start` must reject with a UserError (DataError, PluginError, ConfigError).
    is_deterministic: whether the same turns get the same replies in every attempt.
    environment, environment_config, environment_kwargs: those of InEnvironment, if the partner needs one.
    """

    interaction: ClassVar[type[Interaction] | str]
    says: ClassVar[Sequence[str]]
    config: ClassVar[Mapping[str, Any]] = {}
    interaction_kwargs: ClassVar[Mapping[str, Any]] = {}
    bad_kwargs: ClassVar[Sequence[Mapping[str, Any]]] = ()
    is_deterministic: ClassVar[bool] = True

    def test_name(self) -> None:
        registry = load_plugins().interactions
        check_name(registry, plugin_class(registry, self.interaction))

    def test_replies_are_replies(self) -> None:
        replies, score = self._conversation()
        assert replies, "give at least one turn in `says`"
        for reply in replies:
            check_reply(reply)
        check_number(score, "the final score")

    def test_odd_words_are_answered(self) -> None:
        """The partner replies to any text of a model and never raises."""
        for name, text in ODD_TEXTS.items():
            try:
                replies, score = self._conversation([text, text])
            except Exception as error:  # boundary of one check: the plugin raised
                raise AssertionError(f"{name} text raised {type(error).__name__}: {error}") from error
            for reply in replies:
                check_reply(reply)
            check_number(score, f"the score after {name} text")

    def test_turns_with_calls_are_answered(self) -> None:
        said = Message(
            "assistant",
            "",
            tool_calls=(ToolCall("c1", "search", {"query": "x"}), ToolCall("c2", "", None, "no JSON")),
        )
        history = [
            Message("system", "s"),
            Message("user", "?"),
            said,
            Message("tool", "found", tool_call_id="c1", name="search"),
        ]

        async def main(partner: Interaction) -> InteractionReply:
            return await partner.respond([*history, Message("assistant", "", reasoning="hm")])

        check_reply(self._live(main))

    def test_state_belongs_to_one_trajectory(self) -> None:
        """Two concurrent conversations each get the same replies as alone."""
        alone = self._texts(self._conversation()[0])
        first, second = self._new(), self._new()

        async def both() -> list[list[InteractionReply]]:
            return await side_by_side(
                first.runtime, functools.partial(self._talk, first), functools.partial(self._talk, second)
            )

        for replies in run(first.runtime, both):
            assert self._texts(replies) == alone, (
                "the replies depend on another conversation: keep state in `self`, not in the class"
            )

    def test_rows_that_make_no_sense_are_refused_at_the_start(self) -> None:
        for kwargs in self.bad_kwargs:
            partner = self._new()

            async def start(partner: Interaction = partner, kwargs: Mapping[str, Any] = kwargs) -> None:
                try:
                    await partner.start(**kwargs)
                finally:
                    await partner.finalize()

            try:
                run(partner.runtime, start)
                is_refused = False
            except UserError:
                is_refused = True
            assert is_refused, f"`start` took {dict(kwargs)!r}: raise DataError with what is missing"

    # ----------------------------------------------------------------------------------------------- lifetime

    def test_it_can_be_finalized_unused(self) -> None:
        async def main(partner: Interaction) -> None:
            return None

        watched, log = self._recorded()
        self._live(main, watched)
        check_calls(log, "start", "finalize")

    def test_it_can_be_cancelled_and_finalized(self) -> None:
        async def main(partner: Interaction) -> None:
            messages = [Message("user", "?"), Message("assistant", first(self.says, "says"))]
            await cancelled_at_first_wait(partner.runtime, functools.partial(partner.respond, messages))

        watched, log = self._recorded()
        self._live(main, watched)
        check_calls(log, "start", "respond", "finalize")

    def test_no_task_is_left_behind(self) -> None:
        async def main() -> int:
            partner = self._new()
            await self._talk(partner)
            return len(left_tasks()) if partner.runtime == "asyncio" else 0

        assert run(self._class().runtime, main) == 0, (
            "asyncio tasks still run after `finalize`: cancel them there"
        )

    # -------------------------------------------------------------------------------------------- in the loop

    def test_in_the_loop_it_is_started_answers_scores_and_is_finalized(self) -> None:
        watched, log = self._recorded()
        trajectory = self._play(watched)
        assert trajectory.outcome in SCORED_OUTCOMES, str(trajectory.failure)
        replies = log.count("respond")
        assert replies >= 1
        check_calls(log, "start", *["respond"] * replies, "score", "finalize")

    def test_in_the_loop_a_broken_reply_is_finalized_too(self) -> None:
        async def broken(partner: Interaction, messages: Sequence[Message]) -> InteractionReply:
            raise ToolError("broken on purpose")

        watched, log = self._recorded(broken)
        assert self._play(watched).outcome is Outcome.TOOL_ERROR
        check_calls(log, "start", "respond", "finalize")

    def test_in_the_loop_a_cancelled_trajectory_is_finalized_too(self) -> None:
        watched, log = self._recorded(hang)
        assert self._play(watched, trajectory_timeout_s=0.3).outcome is Outcome.TIMEOUT
        check_calls(log, "start", "respond", "finalize")

    # ------------------------------------------------------------------------------------------------- inside

    def _class(self) -> type[Interaction]:
        return plugin_class(load_plugins().interactions, self.interaction)

    def _new(self) -> Interaction:
        return self._class()(dict(self.config))

    def _live(
        self, main: Callable[[Interaction], Awaitable[Any]], interaction: type[Interaction] | None = None
    ) -> Any:
        """Run `main(partner)` between `start` and `finalize`."""
        partner = (interaction or self._class())(dict(self.config))

        async def whole() -> Any:
            async with self._in_environment(partner):
                return await self._started(partner, main)

        return run(partner.runtime, whole)

    def _conversation(self, says: Sequence[str] | None = None) -> tuple[list[InteractionReply], float | None]:
        async def main(partner: Interaction) -> tuple[list[InteractionReply], float | None]:
            replies = await _replies(partner, self.says if says is None else says)
            return replies, await partner.score()

        return self._live(main)

    async def _talk(self, partner: Interaction) -> list[InteractionReply]:
        async with self._in_environment(partner):
            return await self._started(partner, lambda partner: _replies(partner, self.says))

    async def _started(self, partner: Interaction, main: Callable[[Interaction], Awaitable[T]]) -> T:
        """Return `main(partner)`, between `start` and `finalize`."""
        try:
            await partner.start(**self.interaction_kwargs)
            return await main(partner)
        finally:
            await partner.finalize()

    def _texts(self, replies: Sequence[InteractionReply]) -> list[tuple[str, bool]]:
        return [(reply.text, reply.is_done) if self.is_deterministic else ("", False) for reply in replies]

    def _recorded(self, behaviour: Any = None) -> tuple[type[Interaction], list[str]]:
        """Return a subclass of the interaction that logs its calls, and the log.

        `behaviour` replaces its replies.
        """
        replaced = {} if behaviour is None else {"respond": behaviour}
        return recorded(self._class(), ("start", "respond", "score", "finalize"), replaced)

    def _play(self, interaction: type[Interaction], **settings: Any) -> Trajectory:
        return play(
            list(self.says),
            agent="interaction_agent",
            interaction=interaction,
            interaction_kwargs=dict(self.interaction_kwargs),
            **{
                **self._environment_settings(),
                "interaction_config": {interaction.name: dict(self.config)},
                "max_turns": len(self.says),
                **settings,
            },
        )


async def _replies(partner: Interaction, says: Sequence[str]) -> list[InteractionReply]:
    """Talk until the partner is done or all texts are used."""
    messages, replies = [Message("user", "What is the answer?")], []
    for text in says:
        messages.append(Message("assistant", text))
        replies.append(await partner.respond(tuple(messages)))
        if replies[-1].is_done:
            break
        messages.append(Message("user", replies[-1].text))
    return replies


def check_reply(reply: Any) -> None:
    """Assert that a partner returned an InteractionReply, which checks its own fields."""
    assert isinstance(reply, InteractionReply), (
        f"`respond` returned {type(reply).__name__}; return agentrl.plugins.InteractionReply"
    )
