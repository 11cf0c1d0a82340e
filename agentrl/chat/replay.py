"""Conversations whose assistant turns are known beforehand, built as if a model had sampled them: for imitation and for checks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.chat.conversation import Conversation, Edits
from agentrl.chat.renderer import Renderer, Tools
from agentrl.chat.thinking import CLOSE
from agentrl.errors import ConfigError
from agentrl.types import Message


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """Tokens of a conversation. token_ids: i32[T]; mask: bool[T], True on what the assistant wrote; where each row begins."""

    token_ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    segment_starts: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What was appended: a block of context, or a turn.

    shown: messages that the tokens stand for so far. edit: how the template edited the history, so that the block begins a row;
    replaced: the tokens of the row before, then.
    """

    conversation: Conversation
    shown: int
    ids: list[int]
    is_turn: bool
    edit: str | None = None
    replaced: tuple[int, ...] = ()


def replay(renderer: Renderer, messages: Sequence[Message], tools: Tools, *, edits: Edits = "fork") -> Replay:
    """Build `messages` by turns, each assistant message written as the template writes a last one.

    Raises:
        ConfigError: the template cannot write these messages, or edits them and `edits` is `refuse`.
    """
    ids: list[int] = []
    mask: list[bool] = []
    starts = [0]
    for step in replay_steps(renderer, messages, tools, edits=edits):
        if step.edit is not None:
            starts.append(len(ids))
        ids += step.ids
        mask += [step.is_turn] * len(step.ids)
    return Replay(np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_), tuple(starts))


def replay_steps(renderer: Renderer, messages: Sequence[Message], tools: Tools, *, edits: Edits = "fork") -> Iterator[Step]:
    """Yield each block and each turn as it is appended; messages behind the last turn end in a block."""
    turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
    conversation = Conversation(renderer, messages[: turns[0] if turns else len(messages)], tools, edits=edits)
    yield Step(conversation, len(conversation.messages), conversation.next_prompt(), is_turn=False)
    for turn, following in itertools.pairwise([*turns, len(messages)]):
        written = write_turn(renderer, messages, turn, tools)
        conversation.add_generation(written, is_truncated=False, view=messages[turn])
        yield Step(conversation, turn + 1, written, is_turn=True)
        conversation.add_messages(messages[turn + 1 : following])
        if turn + 1 < len(messages):
            num_forks, tokens = conversation.num_forks, tuple(conversation.token_ids)
            block = conversation.next_prompt()
            if conversation.num_forks > num_forks:
                yield Step(conversation, following, block, is_turn=False, edit=conversation.last_edit, replaced=tokens)
            else:
                yield Step(conversation, following, block, is_turn=False)


def write_turn(renderer: Renderer, messages: Sequence[Message], turn: int, tools: Tools) -> list[int]:
    """Return the tokens that a model would write for assistant message `turn`, by the template's render of it as the last one.

    Raises:
        ConfigError: that render is no continuation of the messages before, or has no end.
    """
    codec = renderer.codec
    shown = [renderer.shown(message) for message in messages[: turn + 1]]
    prompt = renderer.render(shown[:turn], tools, add_generation_prompt=True)
    whole = renderer.render(shown, tools, add_generation_prompt=False)
    text = whole[len(prompt) :] if whole.startswith(prompt) else _behind_header(renderer, prompt, whole, messages[turn].reasoning)
    stop = codec.turn_end.search(text)
    if stop is None:
        raise ConfigError(f"the chat template does not end an assistant turn with {codec.end_of_turn!r}")
    return codec.encode_rendered(text[: stop.end()], after=codec.end_of_turn)


def _behind_header(renderer: Renderer, prompt: str, whole: str, reasoning: str) -> str:
    """Return the turn at the end of `whole`, which does not begin with the generation prompt: that opens a thought, or closes an
    empty one, where the template shows none in a history."""
    header = next((i for i, (left, right) in enumerate(zip(prompt, whole, strict=False)) if left != right), len(whole))
    opened = prompt[header:]
    if renderer.opens_thought(prompt):
        return f"{reasoning}\n{CLOSE}\n\n{whole[header:].lstrip()}"
    if CLOSE in opened:
        return whole[header:]
    raise ConfigError(f"the chat template's assistant turn does not begin with its generation prompt, which ends in {opened!r}")
