"""The partner of GSM8K's rows."""

from __future__ import annotations

import pytest
import trio

from agentrl.errors import ConfigError
from agentrl.extras.answers.gsm8k_partner import Gsm8k
from agentrl.plugins import Interaction, InteractionReply
from agentrl.types import Message


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


# ------------------------------------------------------------------------------------------------------ gsm8k


@pytest.mark.parametrize(
    ("reward", "turns", "score"), [("turn", [0.0, 1.0], None), ("final", [None, None], 1.0)]
)
def test_gsm8k_rewards_turns_or_the_end(reward, turns, score) -> None:
    replies, final = talk(Gsm8k({"reward": reward}), "#### 1", "#### 42", ground_truth="42")
    assert [reply.reward for reply in replies] == turns
    assert [reply.is_done for reply in replies] == [False, True]
    assert final == score


def test_gsm8k_scores_the_last_answer() -> None:
    _, score = talk(Gsm8k({"reward": "final"}), "#### 1", "#### 2", ground_truth="42")
    assert score == 0.0


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="interaction 'gsm8k': reward: Input should be 'turn' or 'final'"):
        Gsm8k({"reward": "both"})
