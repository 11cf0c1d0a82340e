"""A tool in a file of your own: list the file in `agent.plugins` and the tool in `agent.tools`."""

from typing import ClassVar

from agentrl.plugins import Tool, ToolResult
from agentrl.types import JsonObject


class WordLength(Tool):
    """Counts the letters of a word: models read tokens, not letters."""

    name: ClassVar[str] = "word_length"
    description: ClassVar[str] = "Count the letters of a word."
    parameters: ClassVar[JsonObject] = {
        "type": "object",
        "properties": {"word": {"type": "string"}},
        "required": ["word"],
    }

    async def call(self, arguments: JsonObject) -> ToolResult:
        word = arguments["word"].strip()
        if not word.isalpha():
            return ToolResult(f"error: {word!r} is not one word", is_error=True)
        return ToolResult(str(len(word)))
