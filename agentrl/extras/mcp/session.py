"""Sessions with MCP servers through the official client: opened on first use, shared, and always closed.

The client's cancel scopes must be exited by the task that entered them. So each session is owned by its own
asyncio task; calls may come from any task of the same event loop. When the loop ends, it cancels its tasks,
which closes the sessions.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, TextIO

import httpx2
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import INTERNAL_ERROR, INVALID_PARAMS, METHOD_NOT_FOUND, CallToolResult

import agentrl.guard
from agentrl.config.agent import MCPServerConfig
from agentrl.errors import ToolError
from agentrl.extras.hubs.variables import clean_environment, header_values

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 8.0
"""The client closes stdin, waits 2 s, terminates the process group, waits 2 s and kills it.

This bounds the rest.
"""
CANCEL_TIMEOUT_S = 1.0
CONNECT_TIMEOUT_S = 30.0
STDERR_GRACE_S = 0.2
"""Seconds to wait for the last lines of a server that exited; a grandchild may keep the pipe open."""
MAX_SHOWN_LINES = 3
"""Number of lines at the end of a server's stderr that an error shows."""
ANSWERS = frozenset({INVALID_PARAMS, METHOD_NOT_FOUND, INTERNAL_ERROR})
"""Error codes that a living server sends. Any other error means that the session is lost."""


class MCPSession:
    """One session with one server. After `open`, any number of `call`s may run concurrently."""

    def __init__(self, name: str, config: MCPServerConfig) -> None:
        self._name = name
        self._config = config
        self._client: Client | None = None
        self._is_open = asyncio.Event()
        self._closing = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None
        self._stderr: deque[str] = deque(maxlen=MAX_SHOWN_LINES)
        self._num_calls = 0
        self.is_lost = False

    async def open(self) -> Client:
        """Start the server or connect to it, and return the client.

        Raises:
            ToolError: it was not ready within `start_timeout_s`.
        """
        self._owner = asyncio.create_task(self._own(), name=f"mcp server {self._name}")
        self._owner.add_done_callback(_seen)
        opened = asyncio.create_task(self._is_open.wait())
        try:
            await asyncio.wait(
                {opened, self._owner},
                timeout=self._config.start_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            opened.cancel()
            if self._client is None and not self._owner.done():  # too slow, or the caller was cancelled
                self._owner.cancel()
                await asyncio.wait({self._owner}, timeout=CLOSE_TIMEOUT_S)
        if self._client is None:
            raise ToolError(f"{self._label} did not start{self._reason()}")
        return self._client

    async def call(self, tool: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool.

        Raises:
            MCPError: the server refused the call.
            ToolError: the session is lost.
        """
        assert self._client is not None, "open() comes first"
        assert self._owner is not None, "open() comes first"
        self._num_calls += 1
        call = asyncio.create_task(self._client.call_tool(tool, arguments))
        try:
            # If the transport breaks, the owner task ends. So wait for both: the answer alone might never
            # arrive.
            await asyncio.wait({call, self._owner}, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            raise ToolError(f"{self._label} was lost{self._reason()}")
        except MCPError as error:
            if error.code in ANSWERS:
                raise
            self.is_lost = True
            raise ToolError(f"{self._label} was lost: {error}{self._reason()}") from error
        finally:
            self._num_calls -= 1
            await self._forget(call)

    async def close(self) -> None:
        """Close the session, and stop the server if it was started for it. Calls in flight fail."""
        self.is_lost = True
        if self._owner is None or self._owner.done():
            return
        self._closing.set()
        done, _ = await asyncio.wait({self._owner}, timeout=CLOSE_TIMEOUT_S)
        if not done:
            self._owner.cancel()
            log.warning("%s did not end within %g s", self._label, CLOSE_TIMEOUT_S)

    async def _own(self) -> None:
        """Enter and exit the client in this task. Waits for `close`; ends early if the transport breaks."""
        try:
            async with Client(self._transport(), mode=self._mode) as client:
                self._client = client
                self._is_open.set()
                await self._closing.wait()
        finally:
            self.is_lost = True

    async def _forget(self, call: asyncio.Task[CallToolResult]) -> None:
        if not call.done():  # cancelled: the client then tells the server
            call.cancel()
            call.add_done_callback(_seen)
            await asyncio.wait({call}, timeout=CANCEL_TIMEOUT_S)
        if self.is_lost and self._num_calls == 0:
            self._closing.set()  # after the last call of a lost session, its owner may end

    @property
    def _mode(self) -> str:
        # Only the protocol's handshake creates sessions. Later protocol versions have none, and no state
        # between calls.
        return "legacy" if self._config.per_trajectory else "auto"

    @property
    def _label(self) -> str:
        return f"MCP server {self._name!r} ({self._config.url or ' '.join(self._config.command)})"

    def _reason(self) -> str:
        """Return why the session was lost, if known: the client's error, or the end of the server's
        stderr.
        """
        assert self._owner is not None
        if not self._owner.done() or self._owner.cancelled():
            reason = f" within {self._config.start_timeout_s:g} s" if self._client is None else ""
        else:
            error = self._owner.exception()
            reason = f": {_leaf(error)}" if error else ""
        return reason + (f"; it wrote: {' | '.join(self._stderr)}" if self._stderr else "")

    def _transport(self) -> AbstractAsyncContextManager[Any]:
        return self._http() if self._config.url else self._stdio()

    @asynccontextmanager
    async def _http(self) -> AsyncIterator[Any]:
        assert self._config.url is not None
        headers = header_values(self._config.headers_env, key=f"agent.mcp_servers.{self._name}.headers_env")
        # No read timeout: the caller has the deadline, and a tool may take that long.
        timeout = httpx2.Timeout(CONNECT_TIMEOUT_S, read=None)
        async with (
            httpx2.AsyncClient(headers=headers, timeout=timeout) as http,
            streamable_http_client(self._config.url, http_client=http) as streams,
        ):
            yield streams

    @asynccontextmanager
    async def _stdio(self) -> AsyncIterator[Any]:
        # The guard kills the server's process group when this process is gone, even if it was killed.
        guard = ["-P", agentrl.guard.__file__, "--parent-pid", str(os.getpid()), "--"]
        passed = clean_environment(self._config.pass_env, key=f"agent.mcp_servers.{self._name}.pass_env")
        server = StdioServerParameters(
            command=sys.executable, args=[*guard, *self._config.command], env=passed | self._config.env
        )
        with logged_lines(self._name, self._stderr) as stderr:
            async with stdio_client(server, errlog=stderr) as streams:
                stderr.close()  # the server has its own copy, so the log thread ends when the server does
                yield streams


class SharedSession:
    """A session that opens at its first call. `reopens`: if it is lost, the next call opens a new one."""

    def __init__(self, name: str, config: MCPServerConfig, *, reopens: bool) -> None:
        self._name = name
        self._config = config
        self._reopens = reopens
        self._session: MCPSession | None = None
        self._opening = asyncio.Lock()

    async def call(self, tool: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool; see `MCPSession.open` and `MCPSession.call`."""
        async with self._opening:
            if self._session is None or (self._session.is_lost and self._reopens):
                session = MCPSession(self._name, self._config)
                await session.open()
                self._session = session
            session = self._session
        if session.is_lost:
            raise ToolError(
                f"MCP server {self._name!r}: the session of this trajectory was lost, and its state with it"
            )
        return await session.call(tool, arguments)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


@contextmanager
def logged_lines(name: str, last: deque[str]) -> Iterator[TextIO]:
    """Yield a file for a child's stderr. Its lines go to the log, and the last ones to `last`."""
    read_end, write_end = os.pipe()

    def copy() -> None:
        with os.fdopen(read_end, errors="replace") as lines:
            for line in lines:
                if text := line.rstrip():
                    last.append(text)
                    log.info("MCP server %r: %s", name, text)

    thread = threading.Thread(target=copy, name=f"stderr of MCP server {name}", daemon=True)
    thread.start()
    try:
        with os.fdopen(write_end, "w") as file:
            yield file
    finally:
        thread.join(STDERR_GRACE_S)


def _seen(task: asyncio.Task[Any]) -> None:
    """Retrieve a task's error: if the waiting caller is gone, asyncio would log it as never retrieved."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.debug("%s: %r", task.get_name(), error)


def _leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
