"""How a chat template takes what the assistant thought: in a field of its own, or between tags inside of the content."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.chat.codec import THOUGHT, TURN
from agentrl.chat.template import ChatTemplate, TemplateMessage
from agentrl.errors import ConfigError

FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names under which templates look for thoughts, the most common first."""

OPEN = "<think>"
CLOSE = "</think>"


@dataclass(frozen=True, slots=True)
class ThinkingStyle:
    """`field` is the message's field for thoughts; None: the template knows none, and they stand as `<think>` in the content."""

    field: str | None

    @classmethod
    def of(cls, template: ChatTemplate) -> ThinkingStyle:
        """Find the field by showing the template a thought under each name."""
        return cls(next((field for field in FIELDS if field in template.text and _is_shown(template, field)), None))

    def with_thought(self, message: TemplateMessage, thought: str) -> TemplateMessage:
        """Return an assistant's `message` that also holds its thought."""
        if self.field is not None:
            return {**message, self.field: thought}
        return {**message, "content": f"{OPEN}\n{thought}\n{CLOSE}\n\n{message['content']}"}


def _is_shown(template: ChatTemplate, field: str) -> bool:
    probe = [{"role": "user", "content": "?"}, {"role": "assistant", "content": TURN, field: THOUGHT}]
    try:
        return THOUGHT in template.render(probe, add_generation_prompt=False)
    except ConfigError:
        return False
