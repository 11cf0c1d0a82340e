"""A tool with a state, under asyncio, that keeps a task of its own."""

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

from agentrl.plugins import Tool, ToolResult


class Notebook(Tool):
    """Keeps notes for one trajectory; a writer takes them one after the other."""

    name: ClassVar[str] = "notebook"
    description: ClassVar[str] = "Write a note down, and read all notes."
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {"note": {"type": "string"}},
        "required": ["note"],
    }

    async def start(self, *, title: str = "Notes", **_: Any) -> None:
        self.title, self.notes = title, []
        self.queue: asyncio.Queue[tuple[str, asyncio.Future[str]]] = asyncio.Queue()
        self.writer = asyncio.create_task(self._write())

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        written: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        await self.queue.put((arguments["note"], written))
        return ToolResult(await written, metrics={"notes": 1.0})

    async def close(self) -> None:
        self.writer.cancel()
        await asyncio.wait([self.writer])

    async def _write(self) -> None:
        while True:
            note, written = await self.queue.get()
            self.notes.append(note)
            if not written.done():
                written.set_result("\n".join([self.title, *self.notes]))
