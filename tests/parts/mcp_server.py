"""An MCP server for the tests: `python mcp_server.py stdio` or `python mcp_server.py http PORT`.

Over HTTP it prints its port once it listens (0: any that is free). Each call of the calculator appends a line
to the file that the environment variable MCP_CALLS names.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections import defaultdict
from pathlib import Path

import anyio
import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ImageContent, TextContent, ToolAnnotations

server = MCPServer("testing", log_level="ERROR")
notes: defaultdict[str, list[str]] = defaultdict(list)
waiting: list[anyio.Event] = []


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def calculator(expression: str) -> str:
    """Calculate the value of an arithmetic expression."""
    if path := os.environ.get("MCP_CALLS"):
        with Path(path).open("a") as file:
            file.write(f"{expression}\n")
    if set(expression) - set("0123456789+-*/(). "):
        raise ToolError("only numbers and + - * / ( )")
    return f"MCP says {eval(expression)}"


@server.tool()
def process_id() -> str:
    """Return the server's process id."""
    return str(os.getpid())


@server.tool()
def remember(text: str, context: Context) -> list[str]:
    """Remember a text for the rest of the session, and return all that it remembers."""
    request = context.request_context.request
    session = notes[request.headers.get("mcp-session-id", "") if request else ""]
    session.append(text)
    return list(session)


@server.tool()
def recall(context: Context) -> list[str]:
    """Return what the session remembers."""
    request = context.request_context.request
    return notes[request.headers.get("mcp-session-id", "") if request else ""]


@server.tool()
async def meet(people: int) -> str:
    """Return once so many calls wait here at the same time."""
    waiting.append(anyio.Event())
    if len(waiting) >= people:
        for event in waiting:
            event.set()
    await waiting[-1 if len(waiting) < people else 0].wait()
    return f"{people} met"


@server.tool()
async def hang() -> str:
    """Never return."""
    await anyio.sleep_forever()
    return ""


@server.tool()
def die() -> str:
    """End the server at once."""
    os._exit(1)


@server.tool(structured_output=False)
def picture() -> list[TextContent | ImageContent]:
    """Return a text and a picture."""
    return [
        TextContent(type="text", text="look:"),
        ImageContent(type="image", data="aGk=", mime_type="image/png"),
    ]


@server.tool()
def header_hash(name: str, context: Context) -> str:
    """Return the SHA-256 of a header of the request."""
    return hashlib.sha256(context.request_context.request.headers.get(name, "").encode()).hexdigest()


async def serve_http(port: int) -> None:
    listener = socket.create_server(("127.0.0.1", port))
    print(listener.getsockname()[1], flush=True)
    await uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="error")).serve([listener])


if __name__ == "__main__":
    print("the server starts", file=sys.stderr, flush=True)
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        anyio.run(serve_http, int(sys.argv[2]))
