"""A small HTTP/1.1 server on trio streams, for programs: h11, keep-alive, whole bodies in, whole bodies or
streams out.

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


Send = Callable[[bytes], Awaitable[None]]
Begin = Callable[[str], Awaitable[Send]]
"""Sends the head of a response with status 200 and a content type; returns what sends its body, piece by
piece."""


@dataclass(frozen=True, slots=True)
class HttpStream:
    """A response that is sent while it is made.

    `run` calls the given `Begin` at most once, sends the body, and returns None. If it has not begun, it may
    return a complete response instead.
    """

    run: Callable[[Begin], Awaitable[HttpResponse | None]]


Handler = Callable[[HttpRequest], Awaitable[HttpResponse | HttpStream]]
Admit = Callable[[HttpHead], HttpResponse | None]
"""Returns the refusal of a request by its head, or None to admit it."""
Problem = Callable[[HttpHead, int, str], HttpResponse]
"""Writes the response to a request whose body is not read: head, status, what is wrong."""


def admit_all(head: HttpHead) -> HttpResponse | None:
    """Admit every request."""
    return None


def plain_problem(head: HttpHead, status: int, problem: str) -> HttpResponse:
    """Write a problem as plain text."""
    return _text(status, problem)


async def serve_http(
    handler: Handler,
    listeners: Sequence[trio.abc.Listener[trio.abc.Stream]],
    *,
    max_body_bytes: int,
    admit: Admit = admit_all,
    problem: Problem = plain_problem,
) -> None:
    """Serve until cancelled.

    An exception of the handler is logged and answered with 500: a failed request never ends the others.
    """
    rules = _Rules(admit, problem, max_body_bytes)
    await trio.serve_listeners(partial(_serve_connection, handler, rules), list(listeners))


@dataclass(frozen=True, slots=True)
class _Rules:
    """What a server accepts, and how it refuses."""

    admit: Admit
    problem: Problem
    max_body_bytes: int


async def _serve_connection(handler: Handler, rules: _Rules, stream: trio.abc.Stream) -> None:
    connection = _Connection(stream, rules)
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

    def __init__(self, stream: trio.abc.Stream, rules: _Rules) -> None:
        self._stream = stream
        self._rules = rules
        self._state = h11.Connection(h11.SERVER)
        self._method = ""  # of the newest request

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
        """Return the handler's response; None if the client disconnects first, which cancels the handler.

        A stream that has begun is sent here; its response is STREAMED.
        """
        response: HttpResponse | None = None
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                if not await self._receive():
                    nursery.cancel_scope.cancel()
                # Otherwise these bytes are the client's next request, sent early. The state machine keeps
                # them, and a disconnect during this request goes unnoticed.

            nursery.start_soon(watch)
            answer = await _guarded(handler, request)
            response = await self._streamed(answer, request) if isinstance(answer, HttpStream) else answer
            nursery.cancel_scope.cancel()
        return response

    async def _streamed(self, stream: HttpStream, request: HttpRequest) -> HttpResponse | None:
        """Run a stream; return STREAMED, or the response to send in its place. None: it broke off."""
        try:
            answer = await stream.run(self._begin)
            if self._state.our_state is h11.SEND_BODY and answer is None:
                await self._stream.send_all(self._state.send(h11.EndOfMessage()) or b"")
                return STREAMED
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return None  # the client disconnected
        except Exception:  # boundary of one HTTP request
            log.exception("%s %s failed", request.method, request.path)
            answer = INTERNAL_ERROR
        # If the body has begun, the client notices that it has no end.
        return None if self._state.our_state is h11.SEND_BODY else answer

    async def _begin(self, content_type: str) -> Send:
        headers = [("Content-Type", content_type), ("Cache-Control", "no-cache")]
        await self._stream.send_all(self._head(200, headers))

        async def send(data: bytes) -> None:
            await self._stream.send_all(self._state.send(h11.Data(data=data)) or b"")

        return send

    def _head(self, status: int, headers: Sequence[tuple[str, str]]) -> bytes:
        reason = HTTPStatus(status).phrase.encode()
        return self._state.send(h11.Response(status_code=status, headers=list(headers), reason=reason)) or b""

    async def respond(self, response: HttpResponse) -> bool:
        """Send the response, unless it is STREAMED; return whether the connection can be reused."""
        if response is not STREAMED:
            headers = [
                ("Content-Type", response.content_type),
                ("Content-Length", str(len(response.body))),
                *response.headers.items(),
            ]
            data = self._head(response.status, headers)
            if self._method != "HEAD":  # its responses have no body
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
                self._method = head.method
                if (refusal := self._rules.admit(head)) is not None:
                    raise _Refused(refusal)
                # h11 has checked that it is a number
                self._check_size(head, int(head.headers.get("content-length", 0)))
            elif isinstance(event, h11.Data):
                assert head is not None
                body += event.data
                self._check_size(head, len(body))
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                return HttpRequest(head.method, head.path, head.headers, bytes(body))
            else:  # the client closed the connection between two requests
                return None

    def _check_size(self, head: HttpHead, num_bytes: int) -> None:
        limit = self._rules.max_body_bytes
        if num_bytes > limit:
            raise _Refused(self._rules.problem(head, 413, f"the body is longer than {limit} bytes"))

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
            if isinstance(self._stream, trio.abc.HalfCloseableStream):  # TLS is not
                await self._stream.send_eof()
            while await self._stream.receive_some(_READ_BYTES):
                continue


STREAMED = HttpResponse(200, b"")
"""Stands for a response that was sent as a stream."""
INTERNAL_ERROR = HttpResponse(
    500, b'{"error": {"message": "internal error", "type": "server_error", "param": null, "code": null}}'
)


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


async def _guarded(handler: Handler, request: HttpRequest) -> HttpResponse | HttpStream:
    try:
        return await handler(request)
    except Exception:  # boundary of one HTTP request
        log.exception("%s %s failed", request.method, request.path)
        return INTERNAL_ERROR
