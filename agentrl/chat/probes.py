"""Small conversations that show whether a chat template only appends."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.chat.parsing import call_id
from agentrl.chat.renderer import Tools
from agentrl.types import Message, ToolCall

Conversation = tuple[Message, ...]


def probe_conversations(tools: Tools, *, thinks: bool, has_user_turns: bool) -> Iterator[Conversation]:
    """Yield conversations that end where the next generation would begin.

    Args:
        tools: schemas shown; without any there are no tool messages.
        thinks: also probe turns that think, for templates that know `</think>`.
        has_user_turns: also probe a user who speaks again.
    """
    question = Message("user", "How much?")
    for answer in ("Done.", "<think>\nLet me see.\n</think>\n\nDone.") if thinks else ("Done.",):
        chain: list[Message] = [question]
        if tools:
            chain += [*_call_and_results(tools, 0, 1, answer), *_call_and_results(tools, 1, 2, "")]
            yield tuple(chain)
        if has_user_turns:
            yield (
                question,
                Message("assistant", answer),
                Message("user", "Really?"),
                Message("assistant", answer),
                Message("user", "Sure?"),
            )
            yield (*chain, Message("assistant", answer), Message("user", "Really?"))


def _call_and_results(tools: Tools, turn: int, num_calls: int, text: str) -> list[Message]:
    name = str(tools[0]["function"]["name"])
    calls = tuple(ToolCall(call_id(turn, index), name, {"probe": str(index)}) for index in range(num_calls))
    return [Message("assistant", text, calls), *(Message("tool", f"result {call.id}", tool_call_id=call.id, name=name) for call in calls)]
