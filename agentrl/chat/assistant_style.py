"""How a chat template takes an assistant message: thoughts, arguments of calls, and empty content."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.chat.codec import CALL, THOUGHT, TURN
from agentrl.chat.template import ChatTemplate, TemplateMessage, TemplateRefusal

FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Message fields in which templates look for thoughts, the most common first."""

OPEN, CLOSE = "<think>", "</think>"
"""The thought tags that the parsers of sampled turns know."""

TAGS = (
    (OPEN, CLOSE),
    ("<|channel>thought", "<channel|>"),
    ("<|channel>", "<channel|>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Pairs of tags that templates put around thoughts in the content."""


@dataclass(frozen=True, slots=True)
class AssistantStyle:
    """What a template was found to support.

    Attributes:
        field: the message's field for thoughts. None: there is no such field; thoughts are part of the
            content, between `open` and `close`.
        knows_thoughts: the template handles thoughts in a way of its own.
        knows_calls: the template shows tool calls.
        takes_lead, takes_trail: the field must contain the white space before and after the thought, because
            the template does not add it.
        empty: the content of a message that has calls but no text.
        json_arguments: arguments are given as JSON text instead of as an object.
    """

    field: str | None
    open: str
    close: str
    knows_thoughts: bool = False
    knows_calls: bool = False
    takes_lead: bool = True
    takes_trail: bool = True
    empty: str | None = ""
    json_arguments: bool = False

    @classmethod
    def of(cls, template: ChatTemplate) -> AssistantStyle:
        """Detect the style of a template by rendering marked messages."""
        field = next(
            (field for field in FIELDS if field in template.text and _shows_thought(template, field)), None
        )
        tags = next((tags for tags in TAGS if all(tag in template.text for tag in tags)), None)
        choices = [(empty, text) for text in (False, True) for empty in ("", None)]
        shown = next((choice for choice in choices if _shows_call(template, *choice)), None)
        empty, json_arguments = shown or choices[0]
        knows_thoughts, knows_calls = field is not None or tags is not None, shown is not None
        opening, closing = tags or TAGS[0]
        style = cls(
            field, opening, closing, knows_thoughts, knows_calls, empty=empty, json_arguments=json_arguments
        )
        spaces = [dataclasses.replace(style, takes_lead=lead, takes_trail=trail) for lead, trail in _SPACES]
        return next((spaced for spaced in spaces if _keeps_space(template, spaced)), style)

    def message(
        self,
        content: str,
        *,
        thought: str | None = None,
        calls: Sequence[tuple[str, str | None, Mapping[str, Any]]] = (),
    ) -> TemplateMessage:
        """Return an assistant message for the template.

        `thought` may include the white space around it. `calls`: (name, id, arguments) of each call.
        """
        shown: TemplateMessage = {"role": "assistant", "content": content}
        if thought is not None and self.field is not None:
            shown[self.field] = thought
        elif thought is not None:
            space = "\n" if thought == thought.strip() else ""
            shown["content"] = f"{self.open}{space}{thought}{space}{self.close}\n\n{content}"
        if calls:
            shown["content"] = shown["content"] or self.empty
            shown["tool_calls"] = [self._call(*call) for call in calls]
        return shown

    def _call(self, name: str, id: str | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
        given = json.dumps(arguments, ensure_ascii=False) if self.json_arguments else arguments
        return {"type": "function", "id": id, "function": {"name": name, "arguments": given}}

    def raw_thought(self, written: str) -> str | None:
        """Return the text between the thought tags of a sampled turn; None if the turn has no tags.

        The text keeps the white space that the template does not add by itself.
        """
        if self.open not in written and self.close not in written:
            return None
        raw = written.partition(self.close)[0].rpartition(self.open)[2]
        raw = raw if self.takes_lead else raw.lstrip()
        return raw if self.takes_trail else raw.rstrip()

    def with_known_tags(self, written: str) -> str:
        """Return a sampled turn with the template's thought tags replaced by those that the parsers know."""
        if self.open == OPEN:
            return written
        return written.replace(self.open, OPEN, 1).replace(self.close, CLOSE, 1)


_SPACES = ((True, True), (True, False), (False, True), (False, False))


def _keeps_space(template: ChatTemplate, style: AssistantStyle) -> bool:
    """Return whether a thought on its own lines is rendered on its own lines again."""
    written = f"{style.open}\n{THOUGHT}\n{style.close}"
    return written in _render(template, [_QUESTION, style.message(TURN, thought=style.raw_thought(written))])


_QUESTION: TemplateMessage = {"role": "user", "content": "?"}


def _shows_thought(template: ChatTemplate, field: str) -> bool:
    return THOUGHT in _render(template, [_QUESTION, {"role": "assistant", "content": TURN, field: THOUGHT}])


def _shows_call(template: ChatTemplate, empty: str | None, json_arguments: bool) -> bool:
    style = AssistantStyle(None, OPEN, CLOSE, empty=empty, json_arguments=json_arguments)
    return CALL in _render(template, [_QUESTION, style.message("", calls=[("f", "call00000", {"x": CALL})])])


def _render(template: ChatTemplate, messages: Sequence[TemplateMessage]) -> str:
    try:
        return template.render(messages, add_generation_prompt=False)
    except TemplateRefusal:
        return ""
