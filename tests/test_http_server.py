"""The HTTP server against real sockets: whole requests however they arrive, and clients that misbehave or leave."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from agentrl.http.client import HttpClient
from agentrl.http.server import HttpRequest, HttpResponse, serve_http

MAX_BODY = 1000


def with_server(handler, client):
    """Run `client(port)` against a server of `handler`."""

    async def main():
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(serve_http, handler, listeners, max_body_bytes=MAX_BODY))
            with trio.fail_after(10):
                await client(listeners[0].socket.getsockname()[1])
            nursery.cancel_scope.cancel()

    trio.run(main)


async def echo(request: HttpRequest) -> HttpResponse:
    if request.path == "/raise":
        raise RuntimeError("the handler broke")
    text = f"{request.method} {request.path} {request.headers.get('x-name', '')} {len(request.body)}"
    return HttpResponse(200, text.encode(), "text/plain", {"X-Mark": "1"})


async def talk(port: int, *pieces: bytes) -> bytes:
    """Send the pieces one by one, and return all bytes until the server closes."""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        for piece in pieces:
            await stream.send_all(piece)
            await trio.sleep(0)
        received = b""
        async for data in stream:
            received += data
        return received


def test_many_requests_on_kept_connections():
    async def client(port):
        async with HttpClient(f"http://127.0.0.1:{port}", headers={"X-Name": "me"}) as http:
            replies = [(await http.request("POST", f"/{number}?a=b", json={"n": number})).body for number in range(3)]
        assert replies == [f"POST /{number} me 7".encode() for number in range(3)]

    with_server(echo, client)


def test_a_request_may_arrive_byte_by_byte_and_two_at_once():
    one = b"POST /first HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
    two = b"GET /second HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"

    async def client(port):
        received = await talk(port, *(bytes([byte]) for byte in one), two)
        together = await talk(port, one + two)
        for answer in (received, together):
            assert answer.count(b"HTTP/1.1 200 OK") == 2
            assert answer.index(b"POST /first  3") < answer.index(b"GET /second  0")
            assert b"X-Mark: 1" in answer

    with_server(echo, client)


def test_a_client_that_waits_for_100_continue_gets_it():
    head = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"

    async def client(port):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(head)
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 100")
            await stream.send_all(b"abc")
            assert b"POST /x  3" in await stream.receive_some()

    with_server(echo, client)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),  # no Host
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n" + b"x" * 9999, b"413"),
    ],
)
def test_a_wrong_request_is_refused_and_the_connection_closed(sent, status):
    async def client(port):
        assert (await talk(port, sent)).split()[1] == status
        assert b" 200 " in await talk(port, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"), "others are served"

    with_server(echo, client)


def test_a_handler_that_raises_is_one_500(caplog):
    async def client(port):
        async with HttpClient(f"http://127.0.0.1:{port}") as http:
            assert (await http.request("GET", "/raise")).status == 500
            assert (await http.request("GET", "/next")).status == 200

    with_server(echo, client)
    assert "the handler broke" in caplog.text


@pytest.mark.parametrize("sent_before_leaving", [0, 30, None], ids=["nothing", "half a request", "a whole request"])
def test_a_client_that_leaves_cancels_its_handler_and_nothing_else(sent_before_leaving):
    began, ended = trio.Event(), trio.Event()

    async def handler(request):
        if request.path == "/quick":
            return HttpResponse(200, b"")
        began.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    async def client(port):
        request = b"POST /slow HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(request[:sent_before_leaving])
            if sent_before_leaving is None:
                await began.wait()
        if sent_before_leaving is None:
            await ended.wait()
        async with HttpClient(f"http://127.0.0.1:{port}") as http:
            assert (await http.request("GET", "/quick")).status == 200
        assert began.is_set() == ended.is_set() == (sent_before_leaving is None)

    with_server(handler, client)
