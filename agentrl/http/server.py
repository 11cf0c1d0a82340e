"""A small HTTP/1.1 server on trio streams for programs on this machine: h11, keep-alive, whole bodies in and
out.

If the client disconnects, the handling of its request is cancelled. Unauthorised requests are refused by
their head; their body is not read.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus

import h11
import trio

log = logging.getLogger(__name__)

_READ_BYTES = 64 * 1024
IDLE_TIMEOUT_S = 600.0
"""Seconds that a kept-alive connection may be idle, and that a request may take to arrive."""


LINGER_S = 2.0
"""Seconds to drain what a refused client still sends.

If the connection closed at once, it might miss the answer.
"""


@dataclass(frozen=True, slots=True)
class HttpHead:
    """The head of a request: `path` has no query, the names in `headers` are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class HttpRequest(HttpHead):
    """One complete request."""

    body: bytes


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """One complete response; Content-Length is added."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[HttpRequest], Awaitable[HttpResponse]]
Admit = Callable[[HttpHead], HttpResponse | None]
"""Returns the refusal of a request by its head, or None to admit it."""


def admit_all(head: HttpHead) -> HttpResponse | None:
    """Admit every request."""
    return None


async def serve_http(
    handler: Handler,
    listeners: Sequence[trio.SocketListener],
    *,
    max_body_bytes: int,
    admit: Admit = admit_all,
) -> None:
    """Serve until cancelled.

    An exception of the handler is logged and answered with 500: a failed request never ends the others.
    """
    await trio.serve_listeners(partial(_serve_connection, handler, admit, max_body_bytes), list(listeners))


async def _serve_connection(
    handler: Handler, admit: Admit, max_body_bytes: int, stream: trio.SocketStream
) -> None:
    connection = _Connection(stream, admit, max_body_bytes)
    try:
        while (request := await connection.read_request()) is not None:
            response = await connection.unless_gone(handler, request)
            if response is None or not await connection.respond(response):
                return
    except (trio.BrokenResourceError, trio.ClosedResourceError, h11.LocalProtocolError):
        return  # the client disconnected
    finally:
        await trio.aclose_forcefully(stream)


class _Connection:
    """One client's stream and its HTTP state machine."""

    def __init__(self, stream: trio.SocketStream, admit: Admit, max_body_bytes: int) -> None:
        self._stream = stream
        self._admit = admit
        self._max_body_bytes = max_body_bytes
        self._state = h11.Connection(h11.SERVER)

    async def read_request(self) -> HttpRequest | None:
        """Return the next request.

        None if the client left, timed out, was refused, or does not speak HTTP.
        """
        with trio.move_on_after(IDLE_TIMEOUT_S):
            try:
                return await self._read_request()
            except h11.RemoteProtocolError as error:
                await self._refuse(_text(error.error_status_hint, str(error)))
            except _Refused as refused:
                await self._refuse(refused.response)
        return None

    async def unless_gone(self, handler: Handler, request: HttpRequest) -> HttpResponse | None:
        """Return the handler's response; None if the client disconnects first, which cancels the handler."""
        response: HttpResponse | None = None
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                if not await self._receive():
                    nursery.cancel_scope.cancel()
                # Otherwise these bytes are the client's next request, sent early. The state machine keeps
                # them, and a disconnect during this request goes unnoticed.

            nursery.start_soon(watch)
            response = await _guarded(handler, request)
            nursery.cancel_scope.cancel()
        return response

    async def respond(self, response: HttpResponse) -> bool:
        """Send the response; return whether the connection can be reused."""
        headers = [
            ("Content-Type", response.content_type),
            ("Content-Length", str(len(response.body))),
            *response.headers.items(),
        ]
        reason = HTTPStatus(response.status).phrase.encode()
        data = (
            self._state.send(h11.Response(status_code=response.status, headers=headers, reason=reason)) or b""
        )
        data += self._state.send(h11.Data(data=response.body)) or b""
        data += self._state.send(h11.EndOfMessage()) or b""
        await self._stream.send_all(data)
        if self._state.our_state is not h11.DONE or self._state.their_state is not h11.DONE:
            return False
        self._state.start_next_cycle()
        return True

    async def _read_request(self) -> HttpRequest | None:
        head: HttpHead | None = None
        body = bytearray()
        while True:
            event = self._state.next_event()
            if event is h11.NEED_DATA:
                if self._state.they_are_waiting_for_100_continue:
                    await self._stream.send_all(
                        self._state.send(h11.InformationalResponse(status_code=100, headers=[])) or b""
                    )
                await self._receive()
            elif isinstance(event, h11.Request):
                head = _head(event)
                if (refusal := self._admit(head)) is not None:
                    raise _Refused(refusal)
                self._check_size(
                    int(head.headers.get("content-length", 0))
                )  # h11 has checked that it is a number
            elif isinstance(event, h11.Data):
                body += event.data
                self._check_size(len(body))
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                return HttpRequest(head.method, head.path, head.headers, bytes(body))
            else:  # the client closed the connection between two requests
                return None

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_body_bytes:
            raise _Refused(_text(413, f"the body is longer than {self._max_body_bytes} bytes"))

    async def _receive(self) -> bool:
        """Feed the state machine; return False at the end of the stream."""
        try:
            data = bytes(await self._stream.receive_some(_READ_BYTES))
        except trio.BrokenResourceError:
            data = b""
        self._state.receive_data(data)
        return bool(data)

    async def _refuse(self, response: HttpResponse) -> None:
        """Send the response, drain the input for at most LINGER_S, and leave the connection to be closed."""
        if self._state.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        await self.respond(replace(response, headers={**response.headers, "Connection": "close"}))
        with trio.move_on_after(LINGER_S):
            await self._stream.send_eof()
            while await self._stream.receive_some(_READ_BYTES):
                continue


class _Refused(Exception):
    """The request is refused; the rest of it is not read."""

    def __init__(self, response: HttpResponse) -> None:
        super().__init__(response.status)
        self.response = response


def _text(status: int, problem: str) -> HttpResponse:
    return HttpResponse(status, problem.encode(), "text/plain; charset=utf-8")


def _head(request: h11.Request) -> HttpHead:
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in request.headers}
    return HttpHead(
        request.method.decode("latin-1"), request.target.decode("latin-1").partition("?")[0], headers
    )


async def _guarded(handler: Handler, request: HttpRequest) -> HttpResponse:
    try:
        return await handler(request)
    except Exception:  # boundary of one HTTP request
        log.exception("%s %s failed", request.method, request.path)
        return HttpResponse(
            500,
            b'{"error": {"message": "internal error", "type": "server_error", "param": null, "code": null}}',
        )
