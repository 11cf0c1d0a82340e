"""What was handed in by the tool finish is read without a mark."""

from __future__ import annotations

import pytest

from agentrl.extras.answers.arithmetic import Arithmetic
from agentrl.extras.answers.gsm8k import Gsm8k
from agentrl.plugins import Attempted
from agentrl.types import Message, Outcome, Task, ToolCall

QUESTION = Message("user", "What is 6 * 7?")


def attempt(*messages: Message) -> Attempted:
    task = Task("t", "arithmetic", (QUESTION,), "tool_agent", ground_truth="42")
    return Attempted(task, (QUESTION, *messages), Outcome.COMPLETED, 1, 10, 10, 100)


def said(content: str = "", *calls: tuple[str, dict | None]) -> Message:
    return Message(
        "assistant",
        content,
        tuple(ToolCall(str(i), name, arguments) for i, (name, arguments) in enumerate(calls)),
    )


@pytest.mark.parametrize("reward", [Arithmetic(), Gsm8k()])
def test_what_was_handed_in_needs_no_mark(reward):
    def score(*turn):
        metrics = reward.score(attempt(said(*turn))).metrics
        return metrics["accuracy"], metrics["format"]

    assert score("", ("finish", {"answer": "42"})) == (1.0, 1.0)
    assert score("42") == (0.0, 0.0)
    assert score("#### 42", ("finish", {"answer": "it is 41"})) == (0.0, 1.0)
