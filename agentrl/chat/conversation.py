"""One conversation as tokens; a segment only grows, and its sampled tokens are never rendered again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agentrl.chat.differences import prefix_error, token_error
from agentrl.chat.equality import is_same_message
from agentrl.chat.renderer import HistoryEdited, Renderer, SampledTurn, Tools, num_answers
from agentrl.chat.template import TemplateMessage
from agentrl.errors import DataError
from agentrl.types import Message, PlacedImage

Cut = Literal["left", "right", "middle"]
Edits = Literal["fork", "refuse"]


@dataclass(frozen=True, slots=True)
class Block:
    """The tokens that `next_prompt()` appends, and the render they come from.

    If the template edited the history, `edit` says how. The ids are then a whole prompt that begins a new
    segment, and the last `num_new` of them show the pending messages. images: by their positions in the ids.
    """

    text: str
    history: list[TemplateMessage]
    ids: list[int]
    images: list[PlacedImage]
    edit: str | None = None
    num_new: int = 0


class Conversation:
    """Turns messages into tokens exactly once, one block per generation.

    `token_ids` is the truth; `messages` is a view of it. A block is the difference of two renders: the
    history with the pending messages and the generation prompt, after the end of the last sampled turn. In
    both renders, placeholders replace the sampled text, so its spelling cannot change a token. Two conditions
    are checked: the earlier render is a prefix of the later one, and the later one shows every placeholder.

    If a condition does not hold, the template has edited the history (for example, it drops the thinking of
    earlier turns). Then the conversation forks: `token_ids` restarts with the template's render of the
    messages, and `num_forks` grows by one.
    """

    def __init__(
        self, renderer: Renderer, messages: Sequence[Message], tools: Tools, *, edits: Edits = "fork"
    ) -> None:
        """`edits`: on an edited history, `fork` starts a new segment and `refuse` raises ConfigError."""
        self.token_ids: list[int] = []
        self.images: list[PlacedImage] = []  # by their positions in `token_ids`
        self.num_prompt_tokens = 0  # the first `token_ids`: the prompt, or the history that a fork repeats
        self.num_forks = 0
        self.last_edit: str | None = None  # how the template edited the history at the last fork
        self._renderer = renderer
        self._tools = tools
        self._edits = edits
        self._messages = list(messages)
        self._pending = list(messages)
        self._history: list[TemplateMessage] = []  # all messages in `_rendered`
        self._rendered = ""  # text of the last render, which ends with a generation prompt
        self._num_turns = 0
        self._turn: SampledTurn  # the last one; nothing reads it before the first
        self._is_prompted = False  # the generation prompt was appended: the next tokens are sampled
        self._next: Block | None = None  # the cached result of _prepared(); None after any change

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(self._messages)

    @property
    def prompt_text(self) -> str:
        """The last render, with placeholders for sampled text; it ends with the generation prompt."""
        return self._rendered

    @property
    def tools(self) -> Tools:
        """The schemas that the prompt shows."""
        return self._tools

    @property
    def num_turns(self) -> int:
        """How many turns were sampled."""
        return self._num_turns

    def next_prompt(self) -> list[int]:
        """Append the pending messages and the generation prompt as one block, and return the block.

        Returns [] if the generation prompt was already appended. A turn that was cut at a token limit is
        closed first, with the template's end-of-turn token. If the template edits the history, the block is a
        whole prompt that replaces all earlier tokens, and `num_forks` grows by one.

        Raises:
            ConfigError: the template refuses the messages, or edits the history although `edits` is `refuse`.
        """
        if self._is_prompted:
            return []
        block = self._prepared()
        if block.edit is not None:
            self.token_ids, self.images = [], []
            self.num_forks += 1
            self.last_edit = block.edit
        if not self.token_ids:
            self.num_prompt_tokens = len(block.ids) - block.num_new
        if block.images:
            self.images += [image.moved(len(self.token_ids)) for image in block.images]
        self.token_ids += block.ids
        self._rendered, self._history = block.text, block.history
        self._pending = []
        self._next = None
        self._is_prompted = True
        return block.ids

    def num_pending_tokens(self) -> int:
        """Return how many tokens `next_prompt()` would append."""
        return 0 if self._is_prompted else len(self._prepared().ids)

    def prepare(self) -> None:
        """Render and encode the pending messages ahead of `next_prompt()`.

        May run in a thread, provided that nobody else uses this conversation meanwhile.
        """
        self.num_pending_tokens()

    def num_next_tokens(self) -> int:
        """Return how many tokens `token_ids` will have after `next_prompt()`."""
        starts_anew = not self._is_prompted and self._prepared().edit is not None
        return self.num_pending_tokens() + (0 if starts_anew else len(self.token_ids))

    def extends(self, messages: Sequence[Message]) -> list[Message] | None:
        """Return the messages by which `messages` extends this conversation; None if it is no continuation.

        Messages are compared by value (see `is_same_message`), because they may have passed through another
        program.
        """
        mine = self._messages
        if len(messages) < len(mine) or not all(map(is_same_message, mine, messages)):
            return None
        return list(messages[len(mine) :])

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Queue messages for `next_prompt()`."""
        assert not self._is_prompted, "messages cannot follow a generation prompt"
        self._messages += messages
        self._pending += messages
        self._next = None

    def add_generation(
        self, ids: Sequence[int], *, is_truncated: bool, view: Message | None = None
    ) -> Message:
        """Append sampled tokens, stop token included; return their message: thought, text and tool calls.

        `view`: the message that the tokens were written from, if known; None: parse the tokens.
        """
        assert self._is_prompted, "a generation needs a generation prompt"
        sampled = list(ids)
        self.token_ids += sampled
        text = self._renderer.written(sampled, self._rendered)
        message = view or self._renderer.view(
            text, turn=self._num_turns, is_truncated=is_truncated, tools=self._tools
        )
        self._turn = self._renderer.sampled_turn(message, text, sampled[-1] if sampled else None)
        self._messages.append(message)
        self._num_turns += 1
        self._is_prompted = False
        return message

    def truncate_prompt(self, max_tokens: int, how: Cut) -> bool:
        """Shorten the longest messages until the prompt has at most `max_tokens` tokens.

        Returns whether anything was cut. `left` drops the start of a message's content, `right` the end,
        `middle` the middle. The system message, messages with images, the tools and the template's own text
        stay whole.

        Raises:
            DataError: the prompt is too long even with all other contents empty.
        """
        assert not self.token_ids, "a prompt is cut before it is rendered"
        is_cut = False
        while (excess := self.num_pending_tokens() - max_tokens) > 0:
            lengths = [
                0 if message.role == "system" or message.images else len(message.content)
                for message in self._pending
            ]
            if not any(lengths):
                raise DataError(
                    f"the prompt has {max_tokens + excess} tokens even without its user messages; at most "
                    f"{max_tokens} are allowed"
                )
            longest = lengths.index(max(lengths))
            message = self._pending[longest]
            content = _cut(message.content, self._renderer.codec.token_spans(message.content), excess, how)
            self._pending[longest] = dataclasses.replace(message, content=content)
            self._messages = list(self._pending)
            self._next = None
            is_cut = True
        return is_cut

    def _prepared(self) -> Block:
        if self._next is None:
            self._next = self._block() if self._num_turns else self._whole()
        return self._next

    def _whole(self) -> Block:
        """Render all messages as one prompt."""
        history = [self._renderer.shown(message) for message in self._messages]
        text, ids = self._renderer.prompt(history, self._tools)
        return Block(text, history, *self._placed(ids, self._messages))

    def _placed(self, ids: list[int], messages: Sequence[Message]) -> tuple[list[int], list[PlacedImage]]:
        """Return ids with the placeholders of the images of `messages`, which they render."""
        return self._renderer.codec.place_images(ids, [i for message in messages for i in message.images])

    def _block(self) -> Block:
        renderer = self._renderer
        results = self._pending[: num_answers(self._pending)]
        history = [*self._history, renderer.sampled(self._turn, results), *map(renderer.shown, self._pending)]
        text = renderer.template.render(history, self._tools, add_generation_prompt=True)
        try:
            renderer.check_prefix(self._rendered, text, self._turn)
            ids = renderer.after_turn(text, len(self._rendered), self._turn, self._pending)
        except HistoryEdited as edit:
            return self._fork(text, str(edit))
        return Block(text, history, *self._placed(ids, self._pending))

    def _fork(self, text: str, edit: str) -> Block:
        whole = self._whole()
        if self._edits == "refuse":
            codec = self._renderer.codec
            is_prefix = text.startswith(self._rendered)
            raise (
                token_error(codec, self.token_ids, whole.ids)
                if is_prefix
                else prefix_error(codec, self._rendered, text)
            )
        return dataclasses.replace(whole, edit=edit, num_new=self._num_new(text, whole.images))

    def _num_new(self, text: str, images: Sequence[PlacedImage]) -> int:
        """Return how many of the last tokens of a fork show the pending messages.

        `text`: the render that edits the history. `images`: those of the fork, the pending ones last.
        """
        num_shown = sum(len(message.images) for message in self._pending)
        placeholders = sum(image.num_tokens - 1 for image in images[len(images) - num_shown :])
        num_tokens = len(self._renderer.after_last_turn(text))
        return num_tokens and num_tokens + placeholders


def _cut(content: str, spans: Sequence[tuple[int, int]], excess: int, how: Cut) -> str:
    """Return `content` without `excess` of its tokens, or a few more; `spans` are their character ranges."""
    count = min(excess, len(spans))
    if count == len(spans):
        return ""
    first = {"left": 0, "right": len(spans) - count, "middle": (len(spans) - count) // 2}[how]
    start, end = spans[first][0], spans[first + count - 1][1]
    # Some tokens span no character: always drop at least one character
    return content[:start] + content[max(end, start + 1) :]
