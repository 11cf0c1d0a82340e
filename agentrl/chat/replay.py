"""Conversations whose assistant turns are known beforehand, built as if a model had sampled them: for imitation and for checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.chat.conversation import Conversation, Edits
from agentrl.chat.differences import prefix_error
from agentrl.chat.renderer import Renderer, Tools
from agentrl.errors import ConfigError
from agentrl.types import Message


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """Tokens of a conversation. token_ids: i32[T]; mask: bool[T], True on what the assistant wrote; where each row begins."""

    token_ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    segment_starts: tuple[int, ...]


def replay(
    renderer: Renderer,
    messages: Sequence[Message],
    tools: Tools,
    *,
    edits: Edits = "fork",
    watch: Callable[[Conversation, int], None] | None = None,
) -> Replay:
    """Build `messages` by turns, each assistant message written as the template writes a last one.

    `watch(conversation, n)` is called whenever the generation prompt stands behind the first `n` messages.

    Raises:
        ConfigError: the template cannot write these messages, or edits them and `edits` is `refuse`.
    """
    turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
    first = turns[0] if turns else len(messages)
    conversation = Conversation(renderer, messages[:first], tools, edits=edits)
    ids: list[int] = []
    mask: list[bool] = []
    starts = [0]
    for turn, following in zip([None, *turns], [*turns, len(messages)], strict=True):
        if turn is not None:
            written = write_turn(renderer, messages, turn, tools)
            conversation.add_generation(written, is_truncated=False, view=messages[turn])
            ids, mask = ids + written, mask + [True] * len(written)
            conversation.add_messages(messages[turn + 1 : following])
        if turn is not None and following == turn + 1 == len(messages):
            break  # nothing to answer
        num_forks = conversation.num_forks
        block = conversation.next_prompt()
        starts += [len(ids)] if conversation.num_forks > num_forks else []
        ids, mask = ids + block, mask + [False] * len(block)
        if watch is not None:
            watch(conversation, following)
    return Replay(np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_), tuple(starts))


def write_turn(renderer: Renderer, messages: Sequence[Message], turn: int, tools: Tools) -> list[int]:
    """Return the tokens that the template gives to assistant message `turn` when it is the last one.

    Raises:
        ConfigError: it does not stand behind the generation prompt, or has no end.
    """
    shown = [renderer.shown(message) for message in messages[: turn + 1]]
    before = renderer.render(shown[:turn], tools, add_generation_prompt=True)
    after = renderer.render(shown, tools, add_generation_prompt=False)
    if not after.startswith(before):
        raise prefix_error(renderer.codec, before, after)
    stop = renderer.codec.turn_end.search(after, len(before))
    if stop is None:
        raise ConfigError(f"the chat template does not end an assistant turn with {renderer.codec.end_of_turn!r}")
    return renderer.codec.encode_rendered(after[len(before) : stop.end()], after=renderer.codec.end_of_turn)
