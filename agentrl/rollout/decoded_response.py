"""The response of an attempt as verl decodes it: what functions with verl's signature read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from agentrl.chat.chat import Chat
from agentrl.chat.formats.hermes import Hermes
from agentrl.rollout.recorder import conversation_of_turn
from agentrl.types import Message, Trajectory


def decoded_response(trajectory: Trajectory, response: Sequence[Message], chat: Chat) -> str:
    """Return the tokens of the response as text, without special tokens.

    All that follows the prompt is decoded: sampled turns, and the answers of tools and partners as the
    template wrote them. A segment that repeats the history adds what follows it, so each turn occurs once. Of
    an attempt with several conversations, it is the one that `messages` shows. A server of messages reports
    no tokens: its `response`, the messages after the prompt, is written in the format `hermes`.

    Source: verl, `NaiveRewardManager`: `tokenizer.decode(valid_response_ids, skip_special_tokens=True)`.
    """
    if not trajectory.num_tokens or trajectory.token_ids[0] < 0:
        return "\n".join(map(_written, response))
    text = ""
    for start, end in _response_spans(trajectory):
        # A segment that begins anew shows nothing between the turns: their words must not run together.
        text += "\n" if text and trajectory.action_mask[start] else ""
        text += chat.decode(trajectory.token_ids[start:end].tolist(), skip_special=True)
    return text


def _response_spans(trajectory: Trajectory) -> list[tuple[int, int]]:
    """Return the ranges of the tokens of the response, one for each segment of its conversation."""
    segments = list(itertools.pairwise((*trajectory.segment_starts, trajectory.num_tokens)))
    prompts = trajectory.segment_prompts or [
        int(trajectory.action_mask[start:end].argmax()) for start, end in segments
    ]
    shown = _shown_conversation(trajectory)
    owners = trajectory.segment_conversations or (shown,) * len(segments)
    return [
        (start + prompt, end)
        for (start, end), prompt, owner in zip(segments, prompts, owners, strict=True)
        if owner == shown
    ]


def _shown_conversation(trajectory: Trajectory) -> int:
    """Return the index of the conversation that `messages` shows."""
    owners = trajectory.segment_conversations
    return 0 if not owners or 0 in owners else conversation_of_turn(trajectory, trajectory.turn_ids.max())


def _written(message: Message) -> str:
    if message.role == "assistant":
        return Hermes().write(message)
    return (
        f"<tool_response>\n{message.content}\n</tool_response>" if message.role == "tool" else message.content
    )
