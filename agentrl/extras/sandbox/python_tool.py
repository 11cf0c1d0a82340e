"""A tool that runs the model's Python code in the sandbox.

Each call is a separate program. Files persist between the calls of an attempt.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import trio

from agentrl.errors import SandboxError, ToolError
from agentrl.extras.sandbox import Program, SandboxResult, open_sandbox, read_options
from agentrl.plugins import Tool, ToolResult
from agentrl.types import JsonObject

CONFIG_KEY = "agent.tool_config.python"


class Python(Tool):
    """Returns the program's output, including the value of its last expression, and how it ended if it
    failed.
    """

    name: ClassVar[str] = "python"
    description: ClassVar[str] = (
        "Run a Python program and read what it prints; the value of a last expression is shown too. "
        "Variables are gone after each call, files in the working folder stay. There is no network."
    )
    parameters: ClassVar[JsonObject] = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The program."}},
        "required": ["code"],
    }
    runtime = "trio"

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._sandbox = open_sandbox(read_options(self.config, key=CONFIG_KEY))
        # A run creates each tool once before it plays, so a machine without isolation is rejected at the
        # start.
        self._sandbox.check()
        self._workspace: Path | None = None
        self._turn = trio.Lock()  # concurrent calls share the folder, so they run one at a time

    async def start(self, **create_kwargs: Any) -> None:
        descriptor, path = tempfile.mkstemp(prefix="agentrl-python-")
        os.close(descriptor)
        self._workspace = Path(path)

    async def call(self, arguments: JsonObject) -> ToolResult:
        program = Program(arguments["code"], echo=True, is_merged=True, workspace=self._workspace)
        try:
            async with self._turn:
                result = await self._sandbox.run(program)
        except SandboxError as error:
            raise ToolError(f"tool {self.name!r}: {error}") from error
        metrics = {"wall_s": result.wall_s, "cpu_s": result.cpu_s, "failures": float(not result.is_ok)}
        return ToolResult(_text(result), metrics=metrics, is_error=not result.is_ok)

    async def close(self) -> None:
        if self._workspace is not None:
            self._workspace.unlink(missing_ok=True)


def _text(result: SandboxResult) -> str:
    """Return the text for the model: the output, with notes in brackets about anything that the output does
    not show.
    """
    output = _without_host_paths(result.stdout.rstrip())
    notes = []
    if result.is_output_truncated:
        notes.append("the output was cut")
    # After a traceback, the exit code adds no information.
    is_told = result.exit_code == 1 and "Traceback (most recent call last)" in output
    if (how := result.describe()) and not is_told:
        notes.append(how)
    if result.is_workspace_cut:
        notes.append("the working folder holds too much: not all files were kept")
    if not output and not notes:
        return "(no output)"
    return "\n".join([*([output] if output else []), *(f"[{note}]" for note in notes)])


def _without_host_paths(text: str) -> str:
    """Replace the interpreter's paths by those inside the namespaces.

    Without namespaces, programs see the real paths.
    """
    return text.replace(os.path.realpath(sys.base_prefix), "/python").replace(
        os.path.realpath(sys.prefix), "/packages"
    )
