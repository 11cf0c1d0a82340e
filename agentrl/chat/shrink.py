"""Shrink a conversation to a minimal one with the same property."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from agentrl.types import Message, ToolCall

Messages = tuple[Message, ...]

MAX_TRIALS = 400


def shrink(messages: Messages, is_kept: Callable[[Messages], bool]) -> Messages:
    """Return a smaller conversation for which `is_kept` is still true, as it is for `messages`.

    The search is greedy: it stops when no single simplification keeps the property, or after MAX_TRIALS
    trials.
    """
    trials = 0
    while True:
        for candidate in _simpler(messages):
            trials += 1
            if trials > MAX_TRIALS:
                return messages
            if is_kept(candidate):
                messages = candidate
                break
        else:
            return messages


def _simpler(messages: Messages) -> Iterator[Messages]:
    """Yield simplifications that remove one thing.

    It is the end, a message with its results, a call with its result, or a part of a message.
    """
    for index in range(1, len(messages)):
        if messages[index].role != "tool" and messages[index - 1].role != "tool":
            yield messages[:index]
    question = next((i for i, message in enumerate(messages) if message.role == "user"), None)
    for index, message in enumerate(messages):
        if message.role != "tool" and index != question:
            own = {call.id for call in message.tool_calls}
            yield tuple(m for i, m in enumerate(messages) if i != index and m.tool_call_id not in own)
        for call in message.tool_calls:
            yield _without_call(messages, index, call)
    for index, message in enumerate(messages):
        for simpler in _simpler_message(message):
            yield (*messages[:index], simpler, *messages[index + 1 :])


def _without_call(messages: Messages, index: int, call: ToolCall) -> Messages:
    rest = tuple(other for other in messages[index].tool_calls if other.id != call.id)
    kept = (*messages[:index], replace(messages[index], tool_calls=rest), *messages[index + 1 :])
    return tuple(message for message in kept if message.tool_call_id != call.id)


def _simpler_message(message: Message) -> Iterator[Message]:
    for text in ("", "a", message.content[: len(message.content) // 2]):
        if len(text) < len(message.content):
            yield replace(message, content=text)
    for thought in ("", "t"):
        if len(thought) < len(message.reasoning):
            yield replace(message, reasoning=thought)
    for index, call in enumerate(message.tool_calls):
        if call.arguments:
            for name in call.arguments:
                fewer = replace(
                    call, arguments={key: value for key, value in call.arguments.items() if key != name}
                )
                yield replace(
                    message, tool_calls=(*message.tool_calls[:index], fewer, *message.tool_calls[index + 1 :])
                )
