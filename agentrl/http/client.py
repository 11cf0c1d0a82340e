"""An HTTP/1.1 client on trio streams: h11, keep-alive connections, orjson bodies.

It has no timeouts: use a cancel scope. A request without a reply raises ServerError(status=None). A reply of
any status is an HttpReply.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from json import dumps as dumps_any_integer
from typing import Any
from urllib.parse import urlsplit

import h11
import orjson
import trio

from agentrl.errors import ServerError

_READ_BYTES = 64 * 1024
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e\t]*[\x21-\x7e])?")
_HTML = re.compile(r"<(?:!doctype|html|head|\?xml)\b", re.IGNORECASE)
_TITLE = re.compile(r"<title>(.*?)</title>", re.IGNORECASE)


MAX_REPLY_BYTES = 256 * 2**20

_JSON = orjson.OPT_SERIALIZE_NUMPY
"""Arrays are written as lists, without becoming lists first."""

OnData = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class HttpReply:
    """One complete reply. `origin` is host:port, for error messages."""

    status: int
    body: bytes
    origin: str

    def json(self) -> Any:
        """Return the decoded body; raise ServerError if it is not JSON."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError as error:
            raise ServerError(
                f"{self.origin} sent a body that is not JSON: {self.excerpt(80)!r}", status=self.status
            ) from error

    def excerpt(self, max_chars: int = 300) -> str:
        """Return the beginning of the body in one line; of a page in HTML, its title."""
        text = " ".join(self.body[: 20 * max_chars].decode(errors="replace").split())
        if not _HTML.match(text):
            return text[:max_chars] or "no message"
        title = _TITLE.search(text)
        return f"a page in HTML, {title[1].strip()[:max_chars]!r}" if title else "a page in HTML"


class _StaleConnection(Exception):
    """A kept-alive connection was closed before any byte of the reply: the request may be sent again."""


class HttpClient(AbstractAsyncContextManager["HttpClient"]):
    """Requests to one origin over a pool of keep-alive connections.

    Safe to share among the tasks of one trio run.

    Args:
        base_url: http://host[:port][/prefix] or https://...
        headers: sent with every request, for example an API key. Their values appear in no error message.
        max_connections: further requests wait for a free connection.
        max_reply_bytes: a longer reply is an error; it would fill the memory. A reply that `on_data` reads
            has no bound: its reader keeps what it needs, and bounds that.
    """

    def __init__(
        self,
        base_url: str,
        *,
        headers: Mapping[str, str] | None = None,
        max_connections: int = 1024,
        max_reply_bytes: int = MAX_REPLY_BYTES,
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{base_url!r} is not the URL of a server; write it like http://127.0.0.1:30000")
        self._is_tls = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port or (443 if self._is_tls else 80)
        self._prefix = parts.path.rstrip("/")
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.origin = f"{host}:{self._port}"
        self._headers = [("Host", self.origin), ("Accept", "application/json"), *_checked(headers or {})]
        self._max_reply_bytes = max_reply_bytes
        self._idle: list[_Connection] = []
        self._slots = trio.CapacityLimiter(max_connections)
        self._is_closed = False

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def request(
        self, method: str, path: str, *, json: Any = None, on_data: OnData | None = None
    ) -> HttpReply:
        """Send one request and return its reply, whatever its status.

        If a kept-alive connection turns out to be closed, the request is sent once more on a fresh one.

        Args:
            on_data: gets the body of a reply with status 200 piece by piece; the reply then has none. What it
                raises ends the request.

        Raises:
            ServerError: no complete reply: unreachable, broken off, not HTTP, or longer than
                `max_reply_bytes` (without `on_data`).
        """
        body = b"" if json is None else _encoded(json)
        headers = [*self._headers, ("Content-Length", str(len(body)))]
        if body:
            headers.append(("Content-Type", "application/json"))
        request = h11.Request(method=method, target=self._prefix + path, headers=headers)
        async with self._slots:
            if self._idle:
                # The newest connection first: the oldest are the likeliest to have been closed by the server.
                try:
                    return await self._exchange(self._idle.pop(), request, body, on_data)
                except _StaleConnection:
                    pass
            connection = await self._connect()
            try:
                return await self._exchange(connection, request, body, on_data)
            except _StaleConnection as error:
                raise ServerError(
                    f"{self.origin} closed the connection without a reply to {method} {path}"
                ) from error

    async def connect(self) -> None:
        """Open a connection for the next request; raise ServerError if nobody listens."""
        self._idle.append(await self._connect())

    async def aclose(self) -> None:
        """Close the idle connections. Requests in flight close theirs when they end."""
        self._is_closed = True
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.close()

    async def _connect(self) -> _Connection:
        try:
            stream: trio.abc.Stream = await trio.open_tcp_stream(self._host, self._port)
            if self._is_tls:
                tls = trio.SSLStream(
                    stream, ssl.create_default_context(), server_hostname=self._host, https_compatible=True
                )
                await tls.do_handshake()
                stream = tls
        except (OSError, trio.BrokenResourceError, ssl.SSLError) as error:
            raise ServerError(f"cannot connect to {self.origin}: {_why(error)}") from error
        return _Connection(stream)

    async def _exchange(
        self, connection: _Connection, request: h11.Request, body: bytes, on_data: OnData | None
    ) -> HttpReply:
        try:
            status, reply = await connection.exchange(
                request, body, max_bytes=self._max_reply_bytes, on_data=on_data
            )
        except (trio.BrokenResourceError, h11.RemoteProtocolError, _ReplyTooLong) as error:
            what = f"{request.method.decode()} {request.target.decode()}"
            raise ServerError(
                f"{self.origin} broke off its reply to {what}: {error or type(error).__name__}"
            ) from error
        finally:
            # After an error or a cancellation, the rest of the reply may still be in the stream: do not reuse
            # it.
            if connection.is_reusable and not self._is_closed:
                self._idle.append(connection)
            else:
                await connection.close()
        return HttpReply(status, reply, self.origin)


class _ReplyTooLong(Exception):
    pass


class _Connection:
    """One stream and its HTTP state machine."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._state = h11.Connection(h11.CLIENT)
        self.is_reusable = False

    async def exchange(
        self, request: h11.Request, body: bytes, *, max_bytes: int, on_data: OnData | None
    ) -> tuple[int, bytes]:
        self.is_reusable = False
        data = self._state.send(request) or b""
        if body:
            data += self._state.send(h11.Data(data=body)) or b""
        data += self._state.send(h11.EndOfMessage()) or b""
        try:
            await self._stream.send_all(data)
        except trio.BrokenResourceError as error:
            raise _StaleConnection from error
        del data  # frees the body: the reply may take minutes
        status, reply = await self._read_reply(max_bytes, on_data)
        if self._state.our_state is h11.DONE and self._state.their_state is h11.DONE:
            self._state.start_next_cycle()
            self.is_reusable = True
        return status, reply

    async def _read_reply(self, max_bytes: int, on_data: OnData | None) -> tuple[int, bytes]:
        status, chunks, size, has_bytes = 0, [], 0, False
        while True:
            event = self._state.next_event()
            if event is h11.NEED_DATA:
                data = await self._receive(has_bytes)
                has_bytes = True
                self._state.receive_data(data)
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                if on_data is not None and status == 200:
                    on_data(bytes(event.data))
                    continue
                chunks.append(bytes(event.data))
                size += len(event.data)
                if size > max_bytes:
                    raise _ReplyTooLong(f"longer than {max_bytes} bytes")
            elif isinstance(event, h11.EndOfMessage):
                return status, b"".join(chunks)

    async def _receive(self, has_bytes: bool) -> bytes:
        """Return the next bytes, or b"" at the end of a stream that has sent some.

        Raises:
            _StaleConnection: the stream ended before its first byte.
        """
        try:
            data = bytes(await self._stream.receive_some(_READ_BYTES))
        except trio.BrokenResourceError as error:
            if has_bytes:
                raise
            raise _StaleConnection from error
        if not data and not has_bytes:
            raise _StaleConnection
        return data

    async def close(self) -> None:
        self.is_reusable = False
        with trio.CancelScope(
            shield=True
        ):  # does not block: the connection is dropped without a TLS or TCP goodbye
            await trio.aclose_forcefully(self._stream)


def _encoded(value: Any) -> bytes:
    """Return the JSON of a request."""
    try:
        # Copied: the bytes from orjson keep their whole buffer of 32 KiB or more alive, and thousands of
        # requests wait here at once.
        return bytes(memoryview(orjson.dumps(value, option=_JSON)))
    except orjson.JSONEncodeError:  # such as an integer beyond 64 bits, of a row or of a model's call
        return dumps_any_integer(value, allow_nan=False).encode()


def _why(error: Exception) -> str:
    """Return why a connection failed. trio names the reason of each address only in the cause."""
    cause = error.__cause__
    causes = cause.exceptions if isinstance(cause, ExceptionGroup) else (cause,)
    found: list[Exception] = [one for one in causes if isinstance(one, OSError)] or [error]
    return ", ".join(dict.fromkeys(_reason(one) for one in found))


def _reason(error: Exception) -> str:
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    return os.strerror(error.errno) if error.errno > 0 else error.strerror or str(error)


def _checked(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    # Checked here because h11's own error would print the value, which may be a key.
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise ValueError(
                f"header {name!r} has an empty value, or characters that HTTP headers may not have (a line "
                "break, say)"
            )
    return list(headers.items())
