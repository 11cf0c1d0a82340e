"""Everything that a conversation needs from a tokenizer folder, in one immutable object."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.chat.assistant_style import AssistantStyle
from agentrl.chat.codec import CALL, THOUGHT, TURN, Codec
from agentrl.chat.differences import first_difference
from agentrl.chat.parsing import Parser
from agentrl.chat.recent import Recent
from agentrl.chat.template import ChatTemplate, TemplateMessage, TemplateRefusal
from agentrl.errors import DataError
from agentrl.types import IMAGE_MARK, Message, Role

Tools = Sequence[Mapping[str, Any]]

NUM_CACHED_PROMPTS = 128
"""Prompts kept in the cache. The members of a group begin with the same messages at about the same time."""

# Templates may write arguments with Python's repr or as ASCII JSON. Both escape a noncharacter.
_CALL_MARK = re.compile(re.escape(CALL) + r"|\\ufdd3")
_ANY_MARK = re.compile(f"{TURN}|{THOUGHT}|{_CALL_MARK.pattern}")


def num_answers(messages: Sequence[Message]) -> int:
    """Return how many of the first `messages` are tool results."""
    return next((i for i, message in enumerate(messages) if message.role != "tool"), len(messages))


class HistoryEdited(Exception):
    """The template renders earlier messages differently than before; the text says which."""


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """The parts of a sampled turn, besides calls, that its render as history must show.

    Attributes:
        has_text: the turn has text outside of calls and thoughts.
        thought: None if there was no thought, not even tags; else the white space around it, with THOUGHT in
            place of its words if it had any.
        stop: the token that ended the turn; None: it was cut at a token limit.
    """

    has_text: bool = False
    thought: str | None = None
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A whole conversation to render. Equal if `written`, the JSON of messages and of tools, is equal."""

    written: tuple[str, str]
    messages: Sequence[TemplateMessage] = field(compare=False)
    tools: Tools = field(compare=False)


class Renderer:
    """Conversions: messages -> text (template), text <-> ids (codec), sampled text -> calls (parser)."""

    def __init__(
        self, template: ChatTemplate, codec: Codec, parse: Parser, eos_token_ids: tuple[int, ...]
    ) -> None:
        self.template = template
        self.codec = codec
        self.parse = parse
        self.eos_token_ids = eos_token_ids
        self.style = AssistantStyle.of(template)
        self._ends: dict[Role | None, str | None] = {
            following: self._find_end(following) for following in (None, "user", "tool")
        }
        known = set(self._ends.values()) - {""}
        # The token depends on the message that follows, and is often the first token of that message
        self._end_depends = len(known) > 1 or None in known
        self._written_tools: Recent[Tools, str] = Recent(json.dumps)
        self._cached_prompt: Callable[[_Prompt], tuple[str, tuple[int, ...]]] = functools.lru_cache(
            NUM_CACHED_PROMPTS
        )(self._prompt_of)

    def prompt(self, messages: Sequence[TemplateMessage], tools: Tools) -> tuple[str, list[int]]:
        """Return text and ids of a whole conversation with the generation prompt. Results are cached."""
        key = json.dumps(messages), self._written_tools.get(tools) if tools else ""
        text, ids = self._cached_prompt(_Prompt(key, messages, tools))
        return text, list(ids)

    def _prompt_of(self, prompt: _Prompt) -> tuple[str, tuple[int, ...]]:
        text = self.template.render(prompt.messages, prompt.tools, add_generation_prompt=True)
        return text, tuple(self.codec.encode_rendered(text))

    # ---------------------------------------------------------------------------------- input of the template

    def shown(self, message: Message) -> TemplateMessage:
        """Return a message as the dictionary for the template, with its content protected (see `Codec`)."""
        content = self._content(message)
        if message.role == "assistant":
            thought = self.codec.protect(message.reasoning, message.role) if message.reasoning else None
            calls = [
                (self._name(call.name), call.id, self._protected(call.arguments or {}))
                for call in message.tool_calls
            ]
            return self.style.message(content, thought=thought, calls=calls)
        result: TemplateMessage = {"role": message.role, "content": content}
        if (
            message.name is not None
        ):  # a tool message repeats the name that the model wrote, so it needs protection too
            result["name"] = self.codec.protect(message.name, message.role)
        if message.tool_call_id is not None:
            result["tool_call_id"] = message.tool_call_id
        return result

    def _content(self, message: Message) -> Any:
        """Return the protected content: text, or with images a list of parts."""
        if not message.images:
            return self.codec.protect(message.content, message.role)
        self.codec.seeing()
        texts = message.content.split(IMAGE_MARK)
        if len(texts) != len(message.images) + 1:
            raise DataError(
                f"a message of the {message.role} has {len(message.images)} images, but {IMAGE_MARK} "
                f"{len(texts) - 1} times in its content"
            )
        parts: list[dict[str, str]] = []
        for index, text in enumerate(texts):
            parts += [{"type": "image"}] if index else []
            parts += [{"type": "text", "text": self.codec.protect(text, message.role)}] if text else []
        return parts

    def sampled(self, turn: SampledTurn, results: Sequence[Message]) -> TemplateMessage:
        """Return the dictionary that represents a sampled turn, with placeholders for its text.

        The turn has one call for each of `results`, the tool messages that follow it: templates check roles
        and repeat names and ids. The sampled text itself is never rendered.
        """
        # A turn without text and calls needs the placeholder as well: it marks where the turn ends.
        content = TURN if turn.has_text or not results else ""
        calls = [(self._name(result.name or ""), result.tool_call_id, {"turn": CALL}) for result in results]
        return self.style.message(content, thought=turn.thought, calls=calls)

    def _name(self, name: str) -> str:
        return self.codec.protect(name, "assistant") or "unknown"

    def _protected(self, value: Any) -> Any:
        """Protect the strings inside the arguments of an assistant's call."""
        if isinstance(value, str):
            return self.codec.protect(value, "assistant")
        if isinstance(value, Mapping):
            return {key: self._protected(item) for key, item in value.items()}
        return [self._protected(item) for item in value] if isinstance(value, list | tuple) else value

    # ----------------------------------------------------------------------------------- checks of the render

    def check_prefix(self, before: str, after: str, turn: SampledTurn) -> None:
        """Check that the render `after` begins with the earlier render `before`.

        Raises:
            HistoryEdited: it does not.
        """
        if after.startswith(before):
            return
        place, tags = first_difference(before, after), (self.style.open, self.style.close)
        around = before[max(0, place - len(tags[1])) : place + len(tags[1])]
        drops = any(mark in around for mark in (THOUGHT, *tags))
        if not drops:
            raise HistoryEdited("rewrites earlier messages")
        # The prompt may have opened the thought, so the tags alone do not show whether the thought was empty.
        is_empty = turn.thought is not None and THOUGHT not in turn.thought
        raise HistoryEdited("drops empty thinking" if is_empty else "drops thinking")

    def after_turn(self, text: str, start: int, turn: SampledTurn, following: Sequence[Message]) -> list[int]:
        """Return the tokens of the part of `text` that follows its last sampled turn.

        The turn begins at `start` (see `sampled`); `following` are the messages after it. If the turn was cut
        at a token limit, the result begins with the token that ends it.

        Raises:
            HistoryEdited: a placeholder is missing, or the template ends the turn differently than the model
                did.
        """
        marks = list(_ANY_MARK.finditer(text, start))
        found = [mark[0] for mark in marks]
        if not marks or (turn.has_text and TURN not in found):
            raise HistoryEdited("leaves out what the assistant said")
        if len(found) - found.count(TURN) - found.count(THOUGHT) < num_answers(following):
            raise HistoryEdited("leaves out calls")
        if turn.thought is not None and THOUGHT in turn.thought:
            if THOUGHT not in found:
                raise HistoryEdited("drops thinking")
        elif (turn.thought is not None) != (self.style.close in text[start : marks[-1].start()]):
            raise HistoryEdited("adds empty thinking" if turn.thought is None else "drops empty thinking")
        end = self._shown_end(text, marks[-1].end(), turn, following[0].role if following else None)
        ids = self.codec.encode_rendered(text[end.end() :], after=self.codec.end_of_turn)
        return ids if turn.stop is not None else [self.codec.turn_ends[end[0]], *ids]

    def after_last_turn(self, text: str) -> list[int]:
        """Return the tokens that follow the last sampled turn in a render of an edited history; [] if it does
        not show where the turn ends.
        """
        last = max((mark.end() for mark in _ANY_MARK.finditer(text)), default=None)
        end = None if last is None else self.codec.turn_end.search(text, last)
        return [] if end is None else self.codec.encode_rendered(text[end.end() :], after=end[0])

    def _shown_end(self, text: str, start: int, turn: SampledTurn, following: Role | None) -> re.Match[str]:
        """Return the token in `text` that ends a turn whose last placeholder ends at `start`.

        Raises:
            HistoryEdited: the template ends the turn differently than the model did.
        """
        end = self.codec.turn_end.search(text, start)
        expected = self._ends.get(following) if self._end_depends else ""
        if end is None or expected is None or (expected and end[0] != expected):
            raise HistoryEdited("does not end an earlier turn with a stop token")
        if self._end_depends and turn.stop is not None and turn.stop != self.codec.turn_ends[end[0]]:
            raise HistoryEdited("ends an earlier turn with another token")
        return end

    def last_end(self, message: Message) -> str:
        """Return the first token of the next message, which
        ends a turn for which the template writes no token.
        """
        return self._ends["tool" if message.tool_calls else "user"] or self.codec.end_of_turn

    def _find_end(self, following: Role | None) -> str | None:
        """Return the token with which the template ends a turn before a `following` message.

        `following` None: a last turn. Returns None if the template writes no stop token: the end of a later
        message would then be mistaken for that of the turn. Returns "" if the template refuses or hides the
        probe.
        """
        results = [Message("tool", "", tool_call_id="call00000")] if following == "tool" else []
        behind = [Message("user", "")] if following == "user" else results
        shown = [{**self.shown(message), "content": THOUGHT} for message in behind]
        turns = [SampledTurn(has_text=True), SampledTurn()] if results else [SampledTurn(has_text=True)]
        ends = [self._end_before(self.sampled(turn, results), shown) for turn in turns]
        return None if None in ends else next((end for end in ends if end), "")

    def _end_before(self, turn: TemplateMessage, following: Sequence[TemplateMessage]) -> str | None:
        try:
            text = self.template.render(
                [{"role": "user", "content": "?"}, turn, *following], (), add_generation_prompt=False
            )
        except TemplateRefusal:
            return ""
        last = max((mark.end() for mark in _ANY_MARK.finditer(text) if mark[0] != THOUGHT), default=0)
        if last == 0:
            return ""
        place = text.find(THOUGHT, last)
        end = self.codec.turn_end.search(text, last, place if place >= 0 else len(text))
        return end[0] if end is not None else None

    def count_calls(self, text: str) -> int:
        """Return how many calls of a `sampled` turn `text` shows, up to the end of the turn."""
        first = _CALL_MARK.search(text)
        end = self.codec.turn_end.search(text, first.end()) if first is not None else None
        return sum(1 for _ in _CALL_MARK.finditer(text, 0, len(text) if end is None else end.start()))

    # ----------------------------------------------------------------------------------------- sampled tokens

    def written(self, ids: Sequence[int], prompt: str) -> str:
        """Return the text of sampled tokens, without stop token.

        The text includes the opening tag if `prompt` opened a thought.
        """
        text = self.codec.decode(ids[:-1] if ids and ids[-1] in self.eos_token_ids else ids)
        return prompt[prompt.rindex(self.style.open) :] + text if self.opens_thought(prompt) else text

    def view(self, text: str, *, turn: int, is_truncated: bool, tools: Tools) -> Message:
        """Return the text of a turn (see `written`) as a message; it has no calls if there are no `tools`."""
        parsed = self.parse(
            self.style.with_known_tags(text),
            turn=turn,
            is_truncated=is_truncated,
            tools=tools,
            reads_calls=bool(tools),
        )
        # Without tools, a partner or a reward may read calls from the text: special tokens can be part of it.
        content = self.codec.strip_special(parsed.text) if tools else self._frame.sub("", parsed.text)
        return Message("assistant", content.strip(), parsed.tool_calls, reasoning=parsed.reasoning)

    @functools.cached_property
    def _frame(self) -> re.Pattern[str]:
        """Matches the special tokens that the template writes around the text of a turn."""
        question: TemplateMessage = {"role": "user", "content": "?"}
        try:
            prompt = self.template.render([question], (), add_generation_prompt=True)
            whole = self.template.render(
                [question, self.style.message(TURN)], (), add_generation_prompt=False
            )
        except TemplateRefusal:
            return self.codec.turn_end
        return self.codec.frame(whole.removeprefix(prompt))

    def sampled_turn(self, view: Message, written: str, last_id: int | None) -> SampledTurn:
        """Return the parts of a turn that its render as history must show.

        `view` is the text `written` as a message; `last_id` is the turn's last token.
        """
        raw = self.style.raw_thought(written)
        stop = last_id if last_id in self.eos_token_ids else None
        if raw is None:
            return SampledTurn(bool(view.content.strip()), THOUGHT if view.reasoning else None, stop)
        # A parser may leave thoughts in the content
        has_text = bool(view.content.rpartition(self.style.close)[2].strip())
        return SampledTurn(has_text, raw.replace(raw.strip(), THOUGHT, 1) if raw.strip() else raw, stop)

    def opens_thought(self, prompt: str) -> bool:
        """Return whether the generation prompt ends with an open thought, which the model continues."""
        return prompt.rstrip().endswith(self.style.open)

    def closes_thought(self, prompt: str) -> bool:
        """Return whether the generation prompt contains an empty thought, which disables thinking."""
        return prompt.rstrip().endswith(self.style.close)
