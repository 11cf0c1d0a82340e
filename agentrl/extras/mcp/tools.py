"""The tools of MCP servers as Tool classes: listed once, called in sessions that attempts share."""

from __future__ import annotations

import asyncio
import json
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import mcp.types
from mcp import MCPError

from agentrl.config.agent import MCPServerConfig
from agentrl.errors import PluginError, ToolError
from agentrl.extras.hubs.variables import header_values
from agentrl.extras.mcp.session import MCPSession, SharedSession
from agentrl.plugins import Tool, ToolResult
from agentrl.plugins.arguments import inlined
from agentrl.terminal_text import CONTROL, visible
from agentrl.types import JsonObject


def mcp_tools(servers: Mapping[str, MCPServerConfig]) -> list[type[Tool]]:
    """List the tools of all servers concurrently and return them as Tool classes.

    Raises:
        PluginError: a command or variable does not exist, or a server lacks a tool named in its `tools`.
        ToolError: a server did not start.
    """
    opened = [MCPServer(name, config) for name, config in servers.items()]
    if not opened:
        return []
    # In a thread of its own: the caller may already be inside an event loop.
    with ThreadPoolExecutor(1) as thread:
        listed = thread.submit(asyncio.run, _list_all(opened)).result()
    return [
        tool_class(server, tool)
        for server, tools in zip(opened, listed, strict=True)
        for tool in server.select(tools)
    ]


async def _list_all(servers: list[MCPServer]) -> list[list[mcp.types.Tool]]:
    return await asyncio.gather(*(server.list_tools() for server in servers))


class MCPServer:
    """One configured server, with this process's sessions."""

    def __init__(self, name: str, config: MCPServerConfig) -> None:
        """Raises PluginError if the command does not exist, ConfigError if a variable is not set."""
        self.name = name
        self.config = config
        if config.command and shutil.which(config.command[0]) is None:
            raise PluginError(
                f"agent.mcp_servers.{name}.command: the program {config.command[0]!r} does not exist"
            )
        header_values(config.headers_env, key=f"agent.mcp_servers.{name}.headers_env")
        self.prefix = f"{name}_" if config.prefix is None else config.prefix
        self._shared: WeakKeyDictionary[asyncio.AbstractEventLoop, SharedSession] = WeakKeyDictionary()
        self._of_trajectories: dict[str, SharedSession] = {}
        self._num_users: dict[str, int] = {}

    async def list_tools(self) -> list[mcp.types.Tool]:
        """Start the server or connect to it, list its tools, and disconnect; raise ToolError if it does not
        start.
        """
        session = MCPSession(self.name, self.config)
        client = await session.open()
        tools: list[mcp.types.Tool] = []
        cursor = None
        try:
            async with asyncio.timeout(self.config.start_timeout_s):
                while True:
                    page = await client.list_tools(cursor=cursor)
                    tools += page.tools
                    if (cursor := page.next_cursor) is None:
                        return tools
        except (MCPError, TimeoutError) as error:
            raise ToolError(
                f"MCP server {self.name!r} did not list its tools: {error or 'timeout'}"
            ) from error
        finally:
            await session.close()

    def select(self, tools: list[mcp.types.Tool]) -> list[mcp.types.Tool]:
        """Return the tools that `config.tools` names, in the server's order; all if it names none."""
        names = [tool.name for tool in tools]
        for wanted in self.config.tools:
            if wanted not in names:
                raise PluginError(
                    f"agent.mcp_servers.{self.name}.tools: the server has no tool {wanted!r}; it has: "
                    f"{', '.join(names)}"
                )
        return [tool for tool in tools if not self.config.tools or tool.name in self.config.tools]

    def acquire(self, trajectory: str) -> None:
        """Register one more tool of this attempt. With `per_trajectory`, its tools share one session."""
        self._num_users[trajectory] = self._num_users.get(trajectory, 0) + 1

    async def release(self, trajectory: str) -> None:
        """Unregister one tool of this attempt; the last one closes the attempt's session."""
        self._num_users[trajectory] -= 1
        if self._num_users[trajectory] == 0:
            del self._num_users[trajectory]
            session = self._of_trajectories.pop(trajectory, None)
            if session is not None:
                await session.close()

    async def call(self, trajectory: str, tool: str, arguments: JsonObject) -> mcp.types.CallToolResult:
        """Call a tool in the attempt's session, or in the one that all attempts share."""
        return await self._session(trajectory).call(tool, dict(arguments))

    def _session(self, trajectory: str) -> SharedSession:
        if self.config.per_trajectory:
            if trajectory not in self._of_trajectories:
                self._of_trajectories[trajectory] = SharedSession(self.name, self.config, reopens=False)
            return self._of_trajectories[trajectory]
        loop = asyncio.get_running_loop()
        if loop not in self._shared:
            self._shared[loop] = SharedSession(self.name, self.config, reopens=True)
        return self._shared[loop]


class MCPTool(Tool):
    """One tool of one server. `tool_class` creates the subclasses."""

    runtime = "asyncio"
    server: ClassVar[MCPServer]
    remote_name: ClassVar[str]

    async def start(self, **create_kwargs: Any) -> None:
        """Join the attempt's session. `create_kwargs` are for other tools and ignored."""
        self._trajectory = self.trajectory_key or uuid.uuid4().hex
        self.server.acquire(self._trajectory)

    async def call(self, arguments: JsonObject) -> ToolResult:
        """Call the tool on the server.

        Raises:
            ToolError: the server is gone, or reported an error that is not about the arguments.
        """
        try:
            result = await self.server.call(self._trajectory, self.remote_name, arguments)
        except MCPError as error:
            if error.code == mcp.types.INVALID_PARAMS:
                return ToolResult(error.message, is_error=True)
            raise ToolError(
                f"MCP server {self.server.name!r} failed in {self.remote_name!r}: {error.message}"
            ) from error
        return ToolResult(result_text(result), is_error=bool(result.is_error))

    async def close(self) -> None:
        await self.server.release(self._trajectory)


def tool_class(server: MCPServer, listed: mcp.types.Tool) -> type[MCPTool]:
    """Return the Tool class of one listed tool, under its prefixed name."""
    _refuse_control(server.name, listed)
    hints = listed.annotations
    description = listed.description or listed.title or listed.name
    attributes = {
        "__doc__": description,
        "name": server.prefix + listed.name,
        "description": description,
        "parameters": inlined(listed.input_schema),
        "is_idempotent": hints is not None and bool(hints.read_only_hint or hints.idempotent_hint),
        "server": server,
        "remote_name": listed.name,
    }
    return type(f"MCP_{server.name}_{listed.name}", (MCPTool,), attributes)


def _refuse_control(server: str, listed: mcp.types.Tool) -> None:
    """Raise PluginError if a tool's description has terminal control characters; logs and prompts show it."""
    told = {
        "name": listed.name,
        "title": listed.title,
        "description": listed.description,
        "schema": listed.input_schema,
    }
    for what, value in told.items():
        for text in _texts(value):
            if CONTROL.search(text.replace("\r\n", "\n")) or (what == "name" and not text.isprintable()):
                raise PluginError(
                    f"MCP server {visible(server)!r}: the {what} of tool {listed.name!r} contains "
                    f"control characters: {text[:80]!r}; exclude the tool with "
                    "agent.mcp_servers.*.tools, or fix the server"
                )


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, including the names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield str(name)
            yield from _texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)


def result_text(result: mcp.types.CallToolResult) -> str:
    """Return the text for the model: the text parts line by line, or else the structured content as JSON."""
    parts = [_part_text(part) for part in result.content]
    has_text = any(
        isinstance(part, mcp.types.TextContent | mcp.types.EmbeddedResource) for part in result.content
    )
    if not has_text and result.structured_content is not None:
        parts.insert(0, json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(part for part in parts if part)


def _part_text(part: mcp.types.ContentBlock) -> str:
    if isinstance(part, mcp.types.TextContent):
        return part.text
    if isinstance(part, mcp.types.EmbeddedResource):
        resource = part.resource
        return (
            resource.text
            if isinstance(resource, mcp.types.TextResourceContents)
            else f"[resource omitted: {resource.uri}]"
        )
    if isinstance(part, mcp.types.ResourceLink):
        return f"[resource: {part.uri}]"
    return f"[{part.type} omitted]"
