"""Conversations with known assistant turns, built as if a model had sampled them.

They are used for imitation and for template checks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.chat.conversation import Conversation, Edits
from agentrl.chat.renderer import Renderer, Tools
from agentrl.errors import ConfigError
from agentrl.types import Message, PlacedImage


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """Tokens of a conversation.

    Attributes:
        token_ids: i32[T].
        turn_ids: i32[T], index of the assistant message that a token is of; -1 if the assistant did not write
            it.
        segment_starts: index of the first token of each segment.
        images: by their positions in `token_ids`.
    """

    token_ids: NDArray[np.int32]
    turn_ids: NDArray[np.int32]
    segment_starts: tuple[int, ...]
    images: tuple[PlacedImage, ...] = ()

    @property
    def mask(self) -> NDArray[np.bool_]:
        """bool[T], True on tokens that the assistant wrote."""
        return self.turn_ids >= 0


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedStep:
    """One appended piece: a block of context, or a turn.

    Attributes:
        conversation: the conversation, after this step.
        shown: number of messages that the tokens represent so far.
        ids: the appended tokens.
        is_turn: the piece is an assistant turn.
        edit: how the template edited the history, so that this block begins a segment; None: it did not.
        replaced: the tokens of the previous segment, if `edit` is set.
    """

    conversation: Conversation
    shown: int
    ids: list[int]
    is_turn: bool
    edit: str | None = None
    replaced: tuple[int, ...] = ()


def replay(renderer: Renderer, messages: Sequence[Message], tools: Tools, *, edits: Edits = "fork") -> Replay:
    """Build `messages` turn by turn; assistant messages are written as the template renders a last message.

    Raises:
        ConfigError: the template cannot render these messages, or edits the history although `edits` is
            `refuse`.
    """
    ids: list[int] = []
    turn_ids: list[int] = []
    num_turns = 0
    starts = [0]
    images: list[PlacedImage] = []
    for step in replay_steps(renderer, messages, tools, edits=edits):
        if step.edit is not None:
            starts.append(len(ids))
        # A step's images are the last of its conversation, whose tokens begin where the segment does.
        begin = len(ids) - starts[-1]
        images += [image.moved(starts[-1]) for image in step.conversation.images if image.position >= begin]
        ids += step.ids
        turn_ids += [num_turns if step.is_turn else -1] * len(step.ids)
        num_turns += step.is_turn
    return Replay(
        np.array(ids, dtype=np.int32), np.array(turn_ids, dtype=np.int32), tuple(starts), tuple(images)
    )


def replay_steps(
    renderer: Renderer, messages: Sequence[Message], tools: Tools, *, edits: Edits = "fork"
) -> Iterator[ReplayedStep]:
    """Yield each block and each turn as it is appended. Messages after the last turn form a final block."""
    turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
    conversation = Conversation(
        renderer, messages[: turns[0] if turns else len(messages)], tools, edits=edits
    )
    yield ReplayedStep(conversation, len(conversation.messages), conversation.next_prompt(), is_turn=False)
    for turn, following in itertools.pairwise([*turns, len(messages)]):
        written = write_turn(renderer, messages, turn, tools)
        view = _as_written(renderer, written, messages[turn], conversation.prompt_text)
        conversation.add_generation(written, is_truncated=False, view=view)
        yield ReplayedStep(conversation, turn + 1, written, is_turn=True)
        conversation.add_messages(messages[turn + 1 : following])
        if turn + 1 < len(messages):
            num_forks, tokens = conversation.num_forks, tuple(conversation.token_ids)
            block = conversation.next_prompt()
            if conversation.num_forks > num_forks:
                yield ReplayedStep(
                    conversation,
                    following,
                    block,
                    is_turn=False,
                    edit=conversation.last_edit,
                    replaced=tokens,
                )
            else:
                yield ReplayedStep(conversation, following, block, is_turn=False)


def write_turn(renderer: Renderer, messages: Sequence[Message], turn: int, tools: Tools) -> list[int]:
    """Return the tokens that a model would sample for assistant message `turn`.

    They are what the template renders for the message in last position.

    Raises:
        ConfigError: the render does not continue the messages before it.
    """
    codec = renderer.codec
    prompt = _prompt(renderer, messages[:turn], tools)
    text = _written(renderer, messages[: turn + 1], prompt, tools)
    if text is None:
        text = _written_alone(renderer, messages, turn, prompt, tools)
    if text is None:
        text = _behind_header(renderer, messages[: turn + 1], prompt, tools)
    if text is None:
        raise ConfigError("the chat template's assistant turn does not begin with its generation prompt")
    stop = codec.turn_end.search(text)
    ended = text[: stop.end()] if stop is not None else text + renderer.last_end(messages[turn])
    return codec.encode_rendered(ended, after=codec.end_of_turn)


def _prompt(renderer: Renderer, messages: Sequence[Message], tools: Tools) -> str:
    return renderer.template.render(
        [renderer.shown(message) for message in messages], tools, add_generation_prompt=True
    )


def _whole(renderer: Renderer, messages: Sequence[Message], tools: Tools) -> str:
    return renderer.template.render(
        [renderer.shown(message) for message in messages], tools, add_generation_prompt=False
    )


def _written(renderer: Renderer, messages: Sequence[Message], prompt: str, tools: Tools) -> str | None:
    """Return what the template renders for the last message after `prompt`.

    Returns None if it renders another prompt. Thoughts may differ: a prompt may open a thought, or contain an
    empty one, although the template renders none in a history.
    """
    style = renderer.style
    whole = _whole(renderer, messages, tools)
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    header = prompt.rfind(style.open)
    is_thought = renderer.opens_thought(prompt) or renderer.closes_thought(prompt)
    if not is_thought or not whole.startswith(prompt[:header]):
        return None
    thought, tag, said = whole[header:].rpartition(style.close)
    if renderer.closes_thought(prompt):
        return said.lstrip("\n") if thought.startswith(style.open) else whole[header:]
    return (
        f"{messages[-1].reasoning}\n{style.close}{said}"
        if tag
        else f"{messages[-1].reasoning}\n{style.close}\n\n{said.lstrip()}"
    )


def _written_alone(
    renderer: Renderer, messages: Sequence[Message], turn: int, prompt: str, tools: Tools
) -> str | None:
    """Return what the template renders for a turn directly after the first prompt.

    In its real position, the turn makes the template edit the earlier messages.
    """
    first = next(index for index, message in enumerate(messages) if message.role == "assistant")
    opening = _prompt(renderer, messages[:first], tools)
    text = _written(renderer, [*messages[:first], messages[turn]], opening, tools)
    if text is not None and renderer.opens_thought(opening) and not renderer.opens_thought(prompt):
        text = text.partition(renderer.style.close)[2].lstrip("\n")
    return text


def _behind_header(renderer: Renderer, messages: Sequence[Message], prompt: str, tools: Tools) -> str | None:
    """Return what the template renders for the last message after the header of a generation prompt."""
    bare = _whole(renderer, messages[:-1], tools)
    header = prompt[len(bare) :] if prompt.startswith(bare) else ""
    _, found, text = _whole(renderer, messages, tools).rpartition(header) if header else ("", "", "")
    return text if found else None


def _as_written(renderer: Renderer, ids: Sequence[int], message: Message, prompt: str) -> Message:
    """Return `message` with its thought as the turn contains it.

    The thought is empty if the prompt closed it. Otherwise it has its surrounding white space, which some
    templates repeat.
    """
    if renderer.closes_thought(prompt):
        return dataclasses.replace(message, reasoning="")
    raw = renderer.style.raw_thought(renderer.written(ids, prompt))
    return (
        message
        if raw is None or raw.strip() != message.reasoning.strip()
        else dataclasses.replace(message, reasoning=raw)
    )
