"""The tool `finish`: the trajectory ends with the turn that calls it, and its answer is the attempt's."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize(
    ("messages", "answer"),
    [
        ([], ""),
        ([said("it is 42")], "it is 42"),
        ([said("", ("finish", {"answer": "42"}))], "42"),
        ([said("I am done.", ("calculator", {"expression": "1"}), ("finish", {"answer": "42"}))], "42"),
        (
            [said("", ("finish", {"answer": "41"})), said("no: 42")],
            "no: 42",
        ),  # the first was no end: the limit of calls, say
        ([said("42", ("finish", None))], "42"),  # unreadable: not run
        ([said("42", ("finish", {"answer": 3}))], "42"),
        ([said("42", ("finished", {"answer": "3"}))], "42"),
    ],
)
def test_the_answer_of_an_attempt(messages, answer):
    assert attempt(*messages).answer == answer


def test_the_text_of_the_response_has_what_was_handed_in():
    assert attempt(said("I am done.", ("finish", {"answer": "42"}))).response_text == "I am done.\n42"
