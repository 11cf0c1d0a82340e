"""Two tools that chaos.py gives a run, so that it has a hub process and programs in the sandbox. Each attempt
uses both when it starts, whatever its model calls.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import agentrl.plugins as rl
from agentrl.errors import SandboxError, ToolError
from agentrl.hubs.process import HubProgram, hub_process
from agentrl.sandbox import Program, open_sandbox, read_options
from agentrl.types import JsonObject

SERVER = (sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1")
NOTHING: JsonObject = {"type": "object", "properties": {}}


class KillHub(rl.Tool):
    """Asks a hub process for the server that it keeps."""

    name: ClassVar[str] = "kill_hub"
    description: ClassVar[str] = "Nothing."
    parameters: ClassVar[JsonObject] = NOTHING

    async def start(self, **create_kwargs: Any) -> None:
        program = HubProgram("kill_hub", sys.executable, "agentrl_server.py")
        await hub_process(program).call("url", {"command": list(SERVER), "health": "/"})

    async def call(self, arguments: JsonObject) -> rl.ToolResult:
        return rl.ToolResult("nothing")


class KillSandbox(rl.Tool):
    """Runs a program in the sandbox for half a second."""

    name: ClassVar[str] = "kill_sandbox"
    description: ClassVar[str] = "Nothing."
    parameters: ClassVar[JsonObject] = NOTHING
    runtime = "trio"

    async def start(self, **create_kwargs: Any) -> None:
        try:
            await open_sandbox(read_options({}, key="kill_sandbox")).run(
                Program("import time; time.sleep(0.5)")
            )
        except SandboxError as error:
            raise ToolError(f"tool {self.name!r}: {error}") from error

    async def call(self, arguments: JsonObject) -> rl.ToolResult:
        return rl.ToolResult("nothing")
