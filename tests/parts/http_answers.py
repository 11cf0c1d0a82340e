"""A small HTTP/1.1 server in the tests' own trio loop: whole bodies in, whole bodies out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import h11
import trio


@dataclass(frozen=True)
class HttpRequest:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class HttpResponse:
    status: int
    body: bytes


Handler = Callable[[HttpRequest], Awaitable[HttpResponse]]


async def serve_http(handle: Handler, listeners: Sequence[trio.SocketListener]) -> None:
    """Answer requests by `handle` until cancelled."""

    async def serve(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError, h11.RemoteProtocolError):
            await _serve(handle, stream)

    await trio.serve_listeners(serve, listeners)


async def _serve(handle: Handler, stream: trio.SocketStream) -> None:
    while True:
        http = h11.Connection(h11.SERVER)
        request = await _read(http, stream)
        if request is None:
            return
        response = await handle(request)
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(response.body)))]
        head = h11.Response(status_code=response.status, headers=headers)
        sent = [http.send(head), http.send(h11.Data(response.body)), http.send(h11.EndOfMessage())]
        await stream.send_all(b"".join(piece or b"" for piece in sent))


async def _read(http: h11.Connection, stream: trio.SocketStream) -> HttpRequest | None:
    """Return the next request; None if the client is gone."""
    head, body = None, b""
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await stream.receive_some())
        elif isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            assert head is not None
            headers = {name.decode().lower(): value.decode() for name, value in head.headers}
            path = head.target.decode().partition("?")[0]
            return HttpRequest(head.method.decode(), path, headers, body)
        else:
            return None
