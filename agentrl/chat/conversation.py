"""One conversation as tokens: append only, and what was sampled is never rendered or tokenized again."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal

from agentrl.chat.differences import prefix_error
from agentrl.chat.renderer import Renderer, Tools
from agentrl.chat.template import TemplateMessage
from agentrl.errors import DataError
from agentrl.types import Message

Cut = Literal["left", "right", "middle"]


class Conversation:
    """Messages become tokens once, as one block per generation; `token_ids` is the truth, `messages` a view of it.

    A block is the difference of two renders: the history with the pending messages and the generation prompt, behind the
    end of the last sampled turn. In both renders a placeholder stands for each sampled turn, so that neither its spelling
    nor the template's opinion of it can change a token; that the earlier render is a prefix of the later is checked.
    """

    def __init__(self, renderer: Renderer, messages: Sequence[Message], tools: Tools) -> None:
        self.token_ids: list[int] = []
        self._renderer = renderer
        self._tools = tools
        self._messages = list(messages)
        self._pending = list(messages)
        self._history: list[TemplateMessage] = []  # all that `_rendered` shows
        self._rendered = ""  # text of the last render, which ends with a generation prompt
        self._num_turns = 0
        self._is_closed = True  # the last turn ended with a stop token
        self._is_prompted = False  # the generation prompt stands: the next tokens are sampled
        self._next: tuple[str, list[TemplateMessage], list[int]] | None = None  # what next_prompt() will append

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(self._messages)

    def next_prompt(self) -> list[int]:
        """Append all pending messages and the generation prompt as one block and return it; [] when the prompt stands.

        A turn that was cut at a token limit is closed first, with the template's end-of-turn token.

        Raises:
            ConfigError: the template refuses the messages, or edits what it rendered before.
        """
        if self._is_prompted:
            return []
        self._rendered, self._history, block = self._prepared()
        self.token_ids += block
        self._pending = []
        self._next = None
        self._is_prompted = True
        return list(block)

    def num_pending_tokens(self) -> int:
        """Return how many tokens `next_prompt()` would append."""
        return 0 if self._is_prompted else len(self._prepared()[2])

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Let messages wait for `next_prompt()`."""
        assert not self._is_prompted, "messages cannot follow a generation prompt"
        self._messages += messages
        self._pending += messages
        self._next = None

    def add_generation(self, ids: Sequence[int], *, is_truncated: bool) -> Message:
        """Append what was sampled, stop token included, and return its view: text outside of tool calls, and the calls."""
        assert self._is_prompted, "a generation needs a generation prompt"
        sampled = [int(id) for id in ids]
        self.token_ids += sampled
        self._is_closed = bool(sampled) and sampled[-1] in self._renderer.eos_token_ids
        message = self._view(sampled, is_truncated=is_truncated)
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

    def _prepared(self) -> tuple[str, list[TemplateMessage], list[int]]:
        if self._next is None:
            self._next = self._block() if self._num_turns else self._first_block()
        return self._next

    def _first_block(self) -> tuple[str, list[TemplateMessage], list[int]]:
        history = [self._renderer.shown(message) for message in self._pending]
        text = self._renderer.render(history, self._tools, add_generation_prompt=True)
        return text, history, self._renderer.codec.encode_rendered(text)

    def _block(self) -> tuple[str, list[TemplateMessage], list[int]]:
        renderer = self._renderer
        results = list(itertools.takewhile(lambda message: message.role == "tool", self._pending))
        history = [*self._history, renderer.sampled(results), *map(renderer.shown, self._pending)]
        text = renderer.render(history, self._tools, add_generation_prompt=True)
        if not text.startswith(self._rendered):
            raise prefix_error(renderer.codec, self._rendered, text)
        block = renderer.codec.encode_rendered(renderer.after_turn(text), after=renderer.codec.end_of_turn)
        if not self._is_closed:
            block = [renderer.eos_token_ids[0], *block]
        return text, history, block

    def _view(self, sampled: Sequence[int], *, is_truncated: bool) -> Message:
        codec = self._renderer.codec
        body = sampled[:-1] if self._is_closed else sampled
        parsed = self._renderer.parse(codec.decode(body), turn=self._num_turns, is_truncated=is_truncated)
        return Message(role="assistant", content=codec.strip_special(parsed.text).strip(), tool_calls=parsed.tool_calls)


def _cut(content: str, spans: Sequence[tuple[int, int]], excess: int, how: Cut) -> str:
    """Return `content` without `excess` (or a few more) of its tokens; `spans` are their character ranges."""
    count = min(excess, len(spans))
    if count == len(spans):
        return ""
    first = {"left": 0, "right": len(spans) - count, "middle": (len(spans) - count) // 2}[how]
    start, end = spans[first][0], spans[first + count - 1][1]
    return content[:start] + content[max(end, start + 1) :]  # some tokens span no character: drop one at least
