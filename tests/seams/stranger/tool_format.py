"""A tool format that even a random model begins to write: `@NAME JSON` to the end of the line.

`at.jinja` is a chat template that writes it.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from agentrl.chat.parsing import ParsedPiece, SampledText, ToolFormat
from agentrl.types import Message, ToolCall

CALL = re.compile(r"@(\w+) (\{.*\})")


class At(ToolFormat):
    """A call has a line of its own."""

    name = "at"
    sign = re.compile("@' [+] call.function.name")
    closing = "\n"

    def __init__(self) -> None:
        super().__init__("@")

    def read(self, source: SampledText, start: int) -> ParsedPiece | None:
        end = source.text.find("\n", start)
        if end < 0:
            if source.unfinished is None:
                return None
            return ParsedPiece(len(source.text), (ToolCall("", "", None, source.unfinished),))
        return ParsedPiece(end + 1, (_call(source.text[start:end]),))

    def write(self, message: Message) -> str:
        lines = (f"@{call.name} {_json(call.arguments or {})}\n" for call in message.tool_calls)
        return message.content + "".join(lines)


def _call(line: str) -> ToolCall:
    found = CALL.fullmatch(line)
    if found is None:
        return ToolCall("", "", None, f"{line!r} is not @NAME JSON")
    try:
        return ToolCall("", found[1], json.loads(found[2]))
    except ValueError as error:
        return ToolCall("", found[1], None, f"the arguments are not JSON: {error}")


def _json(arguments: Mapping[str, Any]) -> str:
    return json.dumps(dict(arguments), ensure_ascii=False)
