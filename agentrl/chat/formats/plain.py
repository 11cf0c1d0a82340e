"""No tool calls: everything but the thoughts is text."""

from __future__ import annotations

import re

from agentrl.chat.formats.writing import with_thought
from agentrl.chat.parsing import ParsedPiece, SampledText, ToolFormat
from agentrl.types import Message


class Plain(ToolFormat):
    """For templates that show no tools, and for agents that parse the text themselves."""

    name = "none"
    sign = re.compile("<function=")
    generality = 2

    def read(self, source: SampledText, start: int) -> ParsedPiece | None:
        raise AssertionError("only thoughts open here, and those are read by the TurnParser")

    def write(self, message: Message) -> str:
        return with_thought(message.reasoning, message.content)
