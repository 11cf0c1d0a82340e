"""An attempt as a script of `agentrl play`, and as a test: what failed once can be played again."""

from __future__ import annotations

import json
from typing import Any

from agentrl.extras.view.attempt import all_messages, shown_messages
from agentrl.types import Message, Outcome, Trajectory


def as_script(own: Trajectory) -> str:
    """Return the sampled turns as a script for `agentrl play CONFIG --row N --model FILE`.

    Each turn is a line of JSON, which is YAML. A call that could not be read has left no text, so the script
    says where one is missing.
    """
    lines = [f"# {_one_line(own.task_id)}: {own.outcome.value}, reward {own.reward:g}"]
    for message in _said(own):
        unread = sum(call.arguments is None for call in message.tool_calls)
        lines += [f"# the next turn also had {unread} calls that could not be read"] if unread else []
        lines.append(f"- {json.dumps(_turn(message))}")
    return "\n".join(lines) + "\n"


def as_test(own: Trajectory) -> str:
    """Return a test in which the model says the same turns, and the tools must answer the same."""
    said = _said(own)
    messages = all_messages(own)
    first = next((shown.index for shown in shown_messages(own) if shown.turn is not None), len(messages))
    prompt, rest = messages[:first], messages[first:]
    names = {"Message"} if len(prompt) != 1 or prompt[0].role != "user" else set()
    tools = sorted({call.name for message in said for call in message.tool_calls if call.error is None})
    answers = [message.content for message in rest if message.role == "tool"]
    lines = [
        "from agentrl.testing import Call, Says, play",
        *(["from agentrl.types import Message"] if names else []),
        "",
        "",
        f"def test_{_identifier(own.task_id)}() -> None:",
        "    trajectory = play(",
        "        [",
        *(f"            {_says(message)}," for message in said),
        "        ],",
        f"        agent={own.agent_name!r},",
        *([f"        tools={tools!r},"] if tools else []),
        *(
            ["        interaction=...,  # as the row names it"]
            if own.agent_name == "interaction_agent"
            else []
        ),
        *([f"        max_turns={len(said)},"] if own.outcome is Outcome.TURN_LIMIT else []),
        f"        prompt={_prompt(prompt)},",
        "    )",
        f"    assert trajectory.outcome == {own.outcome.value!r}",
    ]
    if answers:
        lines += [
            "    answers = [message.content for message in trajectory.messages if message.role == 'tool']",
            f"    assert answers == {answers!r}",
        ]
    return "\n".join(lines) + "\n"


def _said(own: Trajectory) -> list[Message]:
    messages = all_messages(own)
    sampled = [(shown.turn, shown.index) for shown in shown_messages(own) if shown.turn is not None]
    return [messages[index] for _, index in sorted(sampled)]


def _turn(message: Message) -> str | dict[str, Any]:
    calls = [
        {"name": call.name, "arguments": call.arguments}
        for call in message.tool_calls
        if call.arguments is not None
    ]
    if not calls and not message.reasoning:
        return message.content
    parts = {"text": message.content, "calls": calls, "reasoning": message.reasoning}
    return {name: value for name, value in parts.items() if value}


def _says(message: Message) -> str:
    calls = [
        f"Call({call.name!r}, {call.arguments!r})"
        for call in message.tool_calls
        if call.arguments is not None
    ]
    if not calls and not message.reasoning:
        return repr(message.content)
    tuple_of_calls = f"({', '.join(calls)},)" if calls else "()"
    return f"Says({message.content!r}, {tuple_of_calls}, {message.reasoning!r})"


def _prompt(prompt: tuple[Message, ...]) -> str:
    if len(prompt) == 1 and prompt[0].role == "user":
        return repr(prompt[0].content)
    return f"[{', '.join(f'Message({message.role!r}, {message.content!r})' for message in prompt)}]"


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)


def _identifier(task: str) -> str:
    return "".join(char if char.isascii() and char.isalnum() else "_" for char in task)[:40] or "attempt"
