"""The HTTP server against real sockets: whole requests however they arrive, and clients that misbehave or
leave.
"""

from __future__ import annotations

from functools import partial

import pytest
import trio

from agentrl.extras.gateway.admission import refusal_of
from agentrl.extras.gateway.http_server import HttpHead, HttpRequest, HttpResponse, admit_all, serve_http
from agentrl.http.client import HttpClient

MAX_BODY = 1000


def with_server(handler, client, *, admit=admit_all):
    """Run `client(port)` against a server of `handler`."""

    async def main():
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(serve_http, handler, listeners, max_body_bytes=MAX_BODY, admit=admit))
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
            replies = [
                (await http.request("POST", f"/{number}?a=b", json={"n": number})).body for number in range(3)
            ]
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


def test_an_answer_to_head_has_the_length_of_the_body_and_no_body():
    async def client(port):
        head = b"HEAD /a HTTP/1.1\r\nHost: x\r\n\r\n"
        received = await talk(port, head, b"GET /b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert received.count(b"HTTP/1.1 200 OK") == 2
        assert b"HEAD /a" not in received
        assert received.endswith(b"GET /b  0")

    with_server(echo, client)


def test_a_client_that_waits_for_100_continue_gets_it():
    head = (
        b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\nConnection: "
        b"close\r\n\r\n"
    )

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
        assert b" 200 " in await talk(port, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"), (
            "others are served"
        )

    with_server(echo, client)


def test_who_is_not_admitted_is_answered_before_the_body_comes_and_is_heard_out():
    heads = []

    def admit(head: HttpHead) -> HttpResponse | None:
        heads.append(head)
        return (
            None
            if head.headers.get("x-key") == "mine"
            else HttpResponse(401, b"who are you?", headers={"X-Mark": "2"})
        )

    async def client(port):
        announced = b"POST /a?b HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n"
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(announced)
            answer = await stream.receive_some()
            assert answer.startswith(b"HTTP/1.1 401 ")
            assert answer.endswith(b"who are you?")
            assert b"X-Mark: 2" in answer
            await stream.send_all(
                b"x" * 900
            )  # the client was sending all the time: its connection is not reset
        async with HttpClient(f"http://127.0.0.1:{port}", headers={"X-Key": "mine"}) as http:
            assert (await http.request("POST", "/in", json={})).body == b"POST /in  2"

    with_server(echo, client, admit=admit)
    assert [(head.method, head.path) for head in heads] == [("POST", "/a"), ("POST", "/in")]


def test_a_body_that_is_announced_too_long_is_refused_by_its_head():
    async def client(port):
        assert (await talk(port, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n")).split()[
            1
        ] == b"413"

    with_server(echo, client)


LOCAL = {"host": "127.0.0.1:30000"}
SENT = {"content-length": "2", "content-type": "application/json"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (LOCAL, None),
        ({"host": "localhost"}, None),
        ({"host": "[::1]:80"}, None),
        (LOCAL | SENT, None),
        (LOCAL | SENT | {"content-type": "Application/JSON; charset=utf-8"}, None),
        (LOCAL | {"content-length": "0", "content-type": "text/plain"}, None),
        ({}, 403),
        ({"host": "rebound.example"}, 403),
        ({"host": "127.0.0.1.rebound.example:30000"}, 403),
        ({"host": "[::1"}, 403),
        ({"host": "10.0.0.7"}, 403),
        (LOCAL | SENT | {"origin": "https://page.example"}, 403),
        (LOCAL | SENT | {"origin": "null"}, 403),
        (LOCAL | {"sec-fetch-site": "cross-site"}, 403),
        (LOCAL | SENT | {"content-type": "text/plain"}, 415),
        (LOCAL | {"content-length": "2"}, 415),
        (LOCAL | {"transfer-encoding": "chunked", "content-type": "application/x-www-form-urlencoded"}, 415),
    ],
)
def test_what_only_web_pages_send_is_refused(headers, status):
    refusal = refusal_of(headers, is_on_loopback=True)
    assert (refusal and refusal.status) == status
    elsewhere = refusal_of(headers, is_on_loopback=False)  # under any name; a key is needed there
    assert (elsewhere and elsewhere.status) == (
        status if "host" in headers and headers["host"] == LOCAL["host"] else None
    )


def test_a_handler_that_raises_is_one_500(caplog):
    async def client(port):
        async with HttpClient(f"http://127.0.0.1:{port}") as http:
            assert (await http.request("GET", "/raise")).status == 500
            assert (await http.request("GET", "/next")).status == 200

    with_server(echo, client)
    assert "the handler broke" in caplog.text


@pytest.mark.parametrize(
    "sent_before_leaving", [0, 30, None], ids=["nothing", "half a request", "a whole request"]
)
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
