"""One conversation as tokens: append only within a row, and what was sampled is never rendered or tokenized again in it."""

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
from agentrl.types import Message

Cut = Literal["left", "right", "middle"]
Edits = Literal["fork", "refuse"]


@dataclass(frozen=True, slots=True)
class Block:
    """What `next_prompt()` appends, and the render it comes from.

    `edit` says how the template edited the history; then the ids are a whole prompt that begins another row.
    """

    text: str
    history: list[TemplateMessage]
    ids: list[int]
    edit: str | None = None


class Conversation:
    """Messages become tokens once, as one block per generation; `token_ids` is the truth, `messages` a view of it.

    A block is the difference of two renders: the history with the pending messages and the generation prompt, behind the
    end of the last sampled turn. In both renders marks stand for what was sampled, so that its spelling cannot change a
    token; that the earlier render is a prefix of the later, and that the later shows every mark, is checked.

    Where it is not so, the template has edited the history (it drops the thinking of earlier turns, say). Then the
    conversation forks: `token_ids` begins anew with the template's render of the messages, and `num_forks` grows.
    """

    def __init__(self, renderer: Renderer, messages: Sequence[Message], tools: Tools, *, edits: Edits = "fork") -> None:
        """`edits`: what happens when the template edits the history; `refuse` makes it a ConfigError."""
        self.token_ids: list[int] = []
        self.num_forks = 0
        self.last_edit: str | None = None  # how the template edited the history at the last fork
        self._renderer = renderer
        self._tools = tools
        self._edits = edits
        self._messages = list(messages)
        self._pending = list(messages)
        self._history: list[TemplateMessage] = []  # all that `_rendered` shows
        self._rendered = ""  # text of the last render, which ends with a generation prompt
        self._num_turns = 0
        self._turn = SampledTurn()
        self._is_prompted = False  # the generation prompt stands: the next tokens are sampled
        self._next: Block | None = None  # what next_prompt() will append

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(self._messages)

    @property
    def prompt_text(self) -> str:
        """The last render, with marks for what was sampled; it ends in the generation prompt."""
        return self._rendered

    def next_prompt(self) -> list[int]:
        """Append all pending messages and the generation prompt as one block and return it; [] when the prompt stands.

        A turn that was cut at a token limit is closed first, with the template's end-of-turn token. When the template edits
        the history, the block is a whole prompt, and takes the place of all tokens before it: `num_forks` has grown by one.

        Raises:
            ConfigError: the template refuses the messages; or it edits the history and that is to be refused.
        """
        if self._is_prompted:
            return []
        block = self._prepared()
        if block.edit is not None:
            self.token_ids = []
            self.num_forks += 1
            self.last_edit = block.edit
        self.token_ids += block.ids
        self._rendered, self._history = block.text, block.history
        self._pending = []
        self._next = None
        self._is_prompted = True
        return list(block.ids)

    def num_pending_tokens(self) -> int:
        """Return how many tokens `next_prompt()` would append."""
        return 0 if self._is_prompted else len(self._prepared().ids)

    def prepare(self) -> None:
        """Render and encode what waits, so that the next call finds it done; for a thread, while nobody else uses this conversation."""
        self.num_pending_tokens()

    def num_next_tokens(self) -> int:
        """Return how many tokens `token_ids` will have after `next_prompt()`."""
        starts_anew = not self._is_prompted and self._prepared().edit is not None
        return self.num_pending_tokens() + (0 if starts_anew else len(self.token_ids))

    def extends(self, messages: Sequence[Message]) -> list[Message] | None:
        """Return what `messages` have beyond those of this conversation, None when they are not its continuation.

        Messages are compared as values (see `is_same_message`), for they may have travelled through another program.
        """
        mine = self._messages
        if len(messages) < len(mine) or not all(map(is_same_message, mine, messages)):
            return None
        return list(messages[len(mine) :])

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Let messages wait for `next_prompt()`."""
        assert not self._is_prompted, "messages cannot follow a generation prompt"
        self._messages += messages
        self._pending += messages
        self._next = None

    def add_generation(self, ids: Sequence[int], *, is_truncated: bool, view: Message | None = None) -> Message:
        """Append what was sampled, stop token included, and return its view: thought, text outside of tool calls, and the calls.

        `view`: the message that the tokens were written from, where it is known; None: it is parsed.
        """
        assert self._is_prompted, "a generation needs a generation prompt"
        sampled = list(ids)
        self.token_ids += sampled
        text = self._renderer.written(sampled, self._rendered)
        message = view or self._renderer.view(text, turn=self._num_turns, is_truncated=is_truncated, tools=self._tools)
        self._turn = self._renderer.sampled_turn(message, text, sampled[-1] if sampled else None)
        self._messages.append(message)
        self._num_turns += 1
        self._is_prompted = False
        return message

    def truncate_prompt(self, max_tokens: int, how: Cut) -> bool:
        """Shorten the longest message of the prompt so that the prompt has at most `max_tokens` tokens.

        `left` drops the start of its content, `right` the end, `middle` the middle; system message, tools and the frame
        stay whole. Returns whether anything was dropped.

        Raises:
            DataError: the prompt is too long even without that content.
        """
        assert not self.token_ids, "a prompt is cut before it is rendered"
        is_cut = False
        while (excess := self.num_pending_tokens() - max_tokens) > 0:
            lengths = [0 if message.role == "system" else len(message.content) for message in self._pending]
            if not any(lengths):
                raise DataError(f"the prompt has {max_tokens + excess} tokens without its questions; at most {max_tokens} are allowed")
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

    def _whole(self, *, edit: str | None = None) -> Block:
        """Return the render of all messages as a prompt."""
        history = [self._renderer.shown(message) for message in self._messages]
        text, ids = self._renderer.prompt(history, self._tools)
        return Block(text, history, ids, edit)

    def _block(self) -> Block:
        renderer = self._renderer
        results = self._pending[: num_answers(self._pending)]
        history = [*self._history, renderer.sampled(self._turn, results), *map(renderer.shown, self._pending)]
        text = renderer.render(history, self._tools, add_generation_prompt=True)
        try:
            renderer.check_prefix(self._rendered, text, self._turn)
            ids = renderer.after_turn(text, len(self._rendered), self._turn, self._pending)
        except HistoryEdited as edit:
            return self._fork(text, str(edit))
        return Block(text, history, ids)

    def _fork(self, text: str, edit: str) -> Block:
        whole = self._whole(edit=edit)
        if self._edits == "refuse":
            codec = self._renderer.codec
            is_prefix = text.startswith(self._rendered)
            raise token_error(codec, self.token_ids, whole.ids) if is_prefix else prefix_error(codec, self._rendered, text)
        return whole


def _cut(content: str, spans: Sequence[tuple[int, int]], excess: int, how: Cut) -> str:
    """Return `content` without `excess` (or a few more) of its tokens; `spans` are their character ranges."""
    count = min(excess, len(spans))
    if count == len(spans):
        return ""
    first = {"left": 0, "right": len(spans) - count, "middle": (len(spans) - count) // 2}[how]
    start, end = spans[first][0], spans[first + count - 1][1]
    return content[:start] + content[max(end, start + 1) :]  # some tokens span no character: drop one at least
