"""The tool that ends the task."""

from __future__ import annotations

from typing import ClassVar

from agentrl.plugins import Tool, ToolResult
from agentrl.types import JsonObject


class Finish(Tool):
    """Ends the trajectory with the turn that calls it; rewards find `answer` in `Attempted.answer`."""

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
