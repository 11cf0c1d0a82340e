"""The built-in interactions, and what the loop does with any: limits, scores, metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest
import trio
from agentrl.interactions.scripted import Scripted

from agentrl.plugins import Interaction, InteractionReply
from agentrl.types import Message, Outcome
from parts.scripted import call, play


def talk(interaction: Interaction, *says: str, **row) -> tuple[list[InteractionReply], float | None]:
    """Say one thing after the other until the partner is done; return its replies and its score."""

    async def main():
        await interaction.start(**row)
        messages, replies = [Message("user", "?")], []
        for text in says:
            messages.append(Message("assistant", text))
            replies.append(await interaction.respond(messages))
            if replies[-1].is_done:
                break
            messages.append(Message("user", replies[-1].text))
        score = await interaction.score()
        await interaction.finalize()
        return replies, score

    return trio.run(main)


# --------------------------------------------------------------------------------------------------- scripted


def test_rules_come_before_the_list_and_the_last_score_counts() -> None:
    rules = [
        {"pattern": "price|cost", "reply": "Too much.", "reward": -0.5},
        {"pattern": r"^deal\b", "done": True, "score": 1.0},
        {"pattern": "maybe", "reply": "Decide.", "score": 0.25},
    ]
    partner = Scripted({"replies": ["never used"]})
    replies, score = talk(
        partner, "Hello", "The PRICE is 7", "maybe", "Deal.", replies=["Hi.", "And?"], rules=rules
    )
    assert [reply.text for reply in replies] == ["Hi.", "Too much.", "Decide.", ""]
    assert [reply.reward for reply in replies] == [None, -0.5, None, None]
    assert replies[-1].is_done
    assert score == 1.0


def test_a_script_ends_with_its_replies_and_config_stands_in_for_the_row() -> None:
    replies, score = talk(Scripted({"replies": ["a", "b"]}), "1", "2", "3", "4")
    assert [reply.text for reply in replies] == ["a", "b", ""]
    assert (replies[-1].is_done, score) == (True, None)


# --------------------------------------------------------------------------------------------------- the loop


class Counting(Interaction):
    """Counts what it hears; `plan` chooses how its score comes out."""

    name: ClassVar[str] = "counting"

    async def start(self, *, plan: str = "number") -> None:
        self.plan, self.heard = plan, 0

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        self.heard += 1
        return InteractionReply(
            "go on", is_done=False, metrics={"heard": 1.0, "length": float(len(messages))}
        )

    async def score(self) -> float | None:
        if self.plan == "raise":
            raise RuntimeError("no score")
        return {"number": float(self.heard), "none": None, "nan": float("nan")}[self.plan]


def count(turns=("a", "b", "c", "d"), *, plan="number", weight=1.0, **settings):
    return play(
        turns,
        agent="interaction_agent",
        interaction=Counting,
        interaction_kwargs={"plan": plan},
        reward_config={"interaction_reward_weight": weight},
        **{"max_turns": len(turns), **settings},
    )


def test_the_final_score_lies_on_the_last_action_token() -> None:
    trajectory = count(weight=0.5)
    [event] = [event for event in trajectory.rewards if event.name == "interaction/counting"]
    assert event.value == 0.5 * trajectory.metrics["counting/heard"]
    assert event.position == trajectory.action_mask.nonzero()[0][-1]
    assert trajectory.metrics["reward/interaction"] == trajectory.metrics["counting/heard"], (
        "reported without its weight"
    )


def test_metrics_of_replies_are_added_up() -> None:
    metrics = count().metrics
    heard = int(metrics["counting/heard"])
    assert heard >= 3
    assert metrics["counting/length"] == sum(2 * turn for turn in range(1, heard + 1))


def test_a_weight_of_0_only_reports() -> None:
    trajectory = count(weight=0.0)
    assert all(event.name != "interaction/counting" for event in trajectory.rewards)
    assert trajectory.metrics["reward/interaction"] > 0


def test_no_score_no_event() -> None:
    assert "reward/interaction" not in count(plan="none").metrics


@pytest.mark.parametrize(
    ("plan", "problem"),
    [("raise", "no score"), ("nan", "`score` returned float nan; return a finite number, or None")],
)
def test_a_score_that_fails_is_never_a_zero(plan, problem) -> None:
    trajectory = count(plan=plan)
    assert trajectory.outcome is Outcome.TOOL_ERROR
    assert problem in str(trajectory.failure)
    assert trajectory.rewards == ()


@pytest.mark.parametrize(
    ("max_user_turns", "roles"), [(0, "user assistant"), (1, "user assistant user assistant")]
)
def test_user_turns_are_limited(max_user_turns, roles) -> None:
    trajectory = count(max_user_turns=max_user_turns, turns=("a", "b", "c", "d"))
    assert " ".join(message.role for message in trajectory.messages) == roles
    assert trajectory.outcome is Outcome.TURN_LIMIT


def test_a_partner_that_was_never_spoken_to_is_not_asked_for_a_score() -> None:
    trajectory = play(
        [call("calculator", expression="1")],
        agent="tool_agent",
        tools=["calculator"],
        max_turns=1,
        interaction=Counting,
        interaction_kwargs={"plan": "raise"},
    )
    assert trajectory.outcome is Outcome.TURN_LIMIT, trajectory.failure
