"""The ReAct agent, for models without a tool-call format: thoughts, actions and observations as plain text.

Source: Yao et al. 2023, arXiv:2210.03629.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from agentrl.plugins import AgentLoop, Session
from agentrl.types import JsonObject, Message, Task, ToolCall

INSTRUCTION = """\
Answer the question. You may use these tools:
{tools}

Write in this form:
Thought: what to do next
Action: the name of one tool
Action Input: its arguments as a JSON object
Then stop: the observation will be given to you. Repeat as often as needed. When you know the answer, write:
Thought: why this is the answer
Final Answer: the answer"""
INSTRUCTION_WITHOUT_TOOLS = """\
Answer the question. Write in this form:
Thought: how to find the answer
Final Answer: the answer"""
NO_STEP = "there is neither `Action:` with `Action Input:` nor `Final Answer:`"

_LABEL = re.compile(
    r"^[ \t]*(thought|action input|action|observation|final answer)[ \t]*:[ \t]*",
    re.IGNORECASE | re.MULTILINE,
)
_FENCE = re.compile(r"```[a-z]*\n?(.*?)\n?```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Action:
    """One call of a tool."""

    name: str
    arguments: JsonObject


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """The end of the conversation."""

    text: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """A turn in the wrong form. The model is told the `problem`."""

    problem: str


class ReactAgent(AgentLoop):
    """Runs the action of each turn and replies with its observation, until a turn gives the final answer."""

    name: ClassVar[str] = "react_agent"
    template_shows_tools: ClassVar[bool] = False

    def prompt(self, task: Task, tools: Sequence[JsonObject]) -> Sequence[Message]:
        """Prepend the description of tools and format: append it to the system message, or add a system
        message.
        """
        text = (
            INSTRUCTION.format(tools="\n".join(map(describe, tools))) if tools else INSTRUCTION_WITHOUT_TOOLS
        )
        first, *others = task.messages
        if first.role == "system":
            return [dataclasses.replace(first, content=f"{first.content}\n\n{text}"), *others]
        return [Message("system", text), *task.messages]

    async def run(self, task: Task, session: Session) -> None:
        num_user_turns = 0
        for _ in range(session.limits.turns):
            turn = await session.generate()
            step = parse_step(turn.message.content, session.tools)
            if isinstance(step, FinalAnswer):
                if not session.has_interaction or (await session.interact()).is_done:
                    return
                if num_user_turns == session.limits.user_turns:
                    break
                num_user_turns += 1
            elif turn.is_truncated:  # even an action that parses may be incomplete
                session.add_user_message(
                    "Observation: your message was cut at the token limit; write a shorter one."
                )
            else:
                session.add_user_message(f"Observation: {await self._observe(step, turn.index, session)}")
                if session.is_finished:
                    return
        session.stop_at_turn_limit()

    async def _observe(self, step: Action | Malformed, turn: int, session: Session) -> str:
        if isinstance(step, Malformed):
            return f"not understood: {step.problem}. Write `Action:` and `Action Input:`, or `Final Answer:`."
        [result] = await session.run_tools([ToolCall(f"react{turn:04d}", step.name, step.arguments)])
        return result.text


def describe(tool: JsonObject) -> str:
    """Return a tool's OpenAI schema as one line for the prompt."""
    function = tool["function"]
    arguments = json.dumps(function["parameters"], ensure_ascii=False)
    return f"- {function['name']}: {function['description']} Arguments (JSON schema): {arguments}"


def parse_step(text: str, tools: Sequence[JsonObject]) -> Action | FinalAnswer | Malformed:
    """Parse the first step of a turn.

    Text after an observation that the model made up is ignored. Never raises.
    """
    fields = _fields(text)
    name, arguments = fields.get("action"), fields.get("action input")
    if name is not None and ("final answer" not in fields or _comes_first("action", "final answer", fields)):
        name = name.strip().strip("`*\"'")
        if arguments is None:
            return Malformed("`Action:` is not followed by `Action Input:`")
        return _action(name, arguments, tools)
    if "final answer" in fields:
        return FinalAnswer(fields["final answer"])
    return Malformed(NO_STEP)


def _fields(text: str) -> dict[str, str]:
    """Return label -> text, for the first occurrence of each label before the first `Observation:`."""
    labels = list(_LABEL.finditer(text))
    ends = [*(label.start() for label in labels[1:]), len(text)]
    fields: dict[str, str] = {}
    for label, end in zip(labels, ends, strict=False):  # without labels, `ends` still has one element
        name = label[1].lower()
        if name == "observation":
            break
        fields.setdefault(name, text[label.end() : end].strip())
    return fields


def _comes_first(one: str, other: str, fields: Mapping[str, str]) -> bool:
    order = list(fields)
    return order.index(one) < order.index(other)


def _action(name: str, text: str, tools: Sequence[JsonObject]) -> Action | Malformed:
    if fenced := _FENCE.fullmatch(text):
        text = fenced[1]
    try:
        value = json.loads(text, strict=False)
        json.dumps(
            value, ensure_ascii=False, allow_nan=False
        ).encode()  # Python also reads NaN, 1e999 and halves of surrogate pairs
    except (ValueError, RecursionError):
        value = text
    if isinstance(value, dict):
        return Action(name, value)
    parameter = _only_parameter(name, tools)
    if parameter is not None:  # `Action Input: 6*7` is unambiguous
        return Action(name, {parameter: value if isinstance(value, str) else text})
    return Malformed("`Action Input:` is not a JSON object")


def _only_parameter(name: str, tools: Sequence[JsonObject]) -> str | None:
    """Return the name of a tool's only parameter if it has exactly one and its type is string; else None."""
    parameters: list[Mapping[str, Any]] = [
        t["function"]["parameters"] for t in tools if t["function"]["name"] == name
    ]
    properties: Mapping[str, Any] = parameters[0].get("properties", {}) if parameters else {}
    if len(properties) != 1:
        return None
    [(parameter, schema)] = properties.items()
    return parameter if isinstance(schema, Mapping) and schema.get("type") == "string" else None
