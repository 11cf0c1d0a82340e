"""Messages in the form of OpenAI's requests."""

from __future__ import annotations

import json
from typing import Any

from agentrl.types import Message, ToolCall


def write_message(message: Message) -> dict[str, Any]:
    """Return one message in the form that requests use."""
    written: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.role == "tool":
        return written | {"tool_call_id": message.tool_call_id}
    return written | ({"tool_calls": written_calls(message)} if message.tool_calls else {})


def written_calls(message: Message) -> list[dict[str, Any]]:
    return [written_call(call) for call in message.tool_calls]


def written_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": written_arguments(call)}
    return {"id": call.id, "type": "function", "function": function}


def written_arguments(call: ToolCall) -> str:
    """Return a call's arguments as JSON."""
    return json.dumps(call.arguments or {}, ensure_ascii=False)
