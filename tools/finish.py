"""The tool `finish`, which hands in the answer and ends the attempt."""

from __future__ import annotations

from typing import ClassVar

from agentrl.plugins import Tool, ToolResult
from agentrl.types import JsonObject


class Finish(Tool):
    """Ends the attempt with the turn that calls it. Rewards read `answer` from `Attempted.answer`."""

    name: ClassVar[str] = "finish"
    description: ClassVar[str] = "End the task and hand in the final answer."
    parameters: ClassVar[JsonObject] = {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "The final answer, complete by itself."}},
        "required": ["answer"],
    }
    runtime = "trio"

    async def call(self, arguments: JsonObject) -> ToolResult:
        return ToolResult("finished", is_final=True)
