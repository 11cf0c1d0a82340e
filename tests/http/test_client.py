"""The HTTP client against real sockets: servers that answer, close, break off, babble, wait."""

import ssl
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from agentrl.errors import ServerError
from agentrl.http.client import HttpClient
from parts.raw_http import read_request


class Scripted:
    """A TCP server that plays one script per connection; `served` counts requests per connection."""

    def __init__(self, *scripts):
        self._scripts = list(scripts)
        self.served = []

    async def handle(self, stream):
        script = self._scripts[min(len(self.served), len(self._scripts) - 1)]
        index = len(self.served)
        self.served.append(0)
        async with stream:
            for answer in script:
                if not await read_request(stream):
                    return
                self.served[index] += 1
                if answer is None:
                    return
                await stream.send_all(answer)


@asynccontextmanager
async def serving(handler):
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, handler, listeners)
        port = listeners[0].socket.getsockname()[1]
        yield f"http://127.0.0.1:{port}"
        nursery.cancel_scope.cancel()


def ok(body=b"{}", more=b""):
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%s\r\n%s" % (len(body), more, body)


async def test_requests_share_a_kept_connection():
    server = Scripted([ok(b'{"n": 1}'), ok(b'{"n": 2}'), ok(b'{"n": 3}')])
    async with serving(server.handle) as url, HttpClient(url) as http:
        assert [(await http.request("POST", "/x", json={"a": 1})).json()["n"] for _ in range(3)] == [
            1,
            2,
            3,
        ]
    assert server.served == [3]


@pytest.mark.parametrize("number", [2**64 - 1, 2**64, -(2**70), 123456789012345678901234567890])
async def test_integers_of_any_size_are_sent_exactly(number):
    sent = []

    async def handle(stream):
        async with stream:
            sent.append(await read_request(stream))
            await stream.send_all(ok())

    async with serving(handle) as url, HttpClient(url) as http:
        await http.request("POST", "/x", json={"ground_truth": [number]})
    assert sent == [("/x", {"ground_truth": [number]})]


async def test_a_connection_closed_after_its_reply_is_replaced_unseen():
    server = Scripted([ok()], [ok(), ok()])
    async with serving(server.handle) as url, HttpClient(url) as http:
        for _ in range(3):
            assert (await http.request("GET", "/")).status == 200
    assert server.served == [1, 2]


async def test_a_kept_connection_closed_before_any_byte_is_retried_once_on_a_fresh_one():
    server = Scripted([ok(), None], [ok(b'"second"')])
    async with serving(server.handle) as url, HttpClient(url) as http:
        await http.request("GET", "/")
        assert (await http.request("POST", "/", json={"a": 1})).json() == "second"
    assert server.served == [2, 1]


async def test_a_fresh_connection_closed_without_a_reply_is_an_error_and_not_retried():
    server = Scripted([None])
    async with serving(server.handle) as url, HttpClient(url) as http:
        with pytest.raises(ServerError, match="without a reply") as caught:
            await http.request("GET", "/")
        assert caught.value.status is None
        assert http.origin in str(caught.value)
    assert server.served == [1]


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf a body",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"this is not http\r\n\r\n",
    ],
)
async def test_a_broken_reply_is_an_error_even_on_a_kept_connection(reply):
    server = Scripted([ok(), reply], [ok()])
    async with serving(server.handle) as url, HttpClient(url) as http:
        await http.request("GET", "/")
        with pytest.raises(ServerError, match="broke off its reply to GET /y") as caught:
            await http.request("GET", "/y")
        assert caught.value.__cause__ is not None
        assert (await http.request("GET", "/")).status == 200
    assert server.served == [2, 1]


async def test_chunked_replies_and_interim_ones_are_read():
    chunked = (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\nTransfer-Encoding: "
        b"chunked\r\n\r\n2\r\n[1\r\n3\r\n,2]\r\n0\r\n\r\n"
    )
    server = Scripted([chunked, ok()])
    async with serving(server.handle) as url, HttpClient(url) as http:
        reply = await http.request("GET", "/")
        assert (reply.status, reply.json()) == (201, [1, 2])
        await http.request("GET", "/")
    assert server.served == [2]


async def test_a_reply_that_closes_is_whole_and_its_connection_not_kept():
    closing = b"HTTP/1.1 503 Busy\r\nConnection: close\r\nContent-Length: 2\r\n\r\nno"
    server = Scripted([closing], [b"HTTP/1.0 200 OK\r\n\r\nuntil the end"], [ok()])
    async with serving(server.handle) as url, HttpClient(url) as http:
        assert [(await http.request("GET", "/")).body for _ in range(3)] == [
            b"no",
            b"until the end",
            b"{}",
        ]
    assert server.served == [1, 1, 1]


async def test_a_reply_beyond_the_bound_is_an_error():
    server = Scripted([ok(b"x" * 1001)], [ok(b"x" * 1000)])
    async with serving(server.handle) as url, HttpClient(url, max_reply_bytes=1000) as http:
        with pytest.raises(ServerError, match="longer than 1000 bytes"):
            await http.request("GET", "/")
        assert len((await http.request("GET", "/")).body) == 1000


async def test_nobody_listening_names_host_and_port():
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    await listener.aclose()
    with pytest.raises(ServerError, match=f"cannot connect to 127.0.0.1:{port}") as caught:
        await HttpClient(f"http://127.0.0.1:{port}").request("GET", "/")
    assert caught.value.status is None
    assert isinstance(caught.value.__cause__, OSError)


async def test_cancelling_closes_the_connection():
    arrived, closed = trio.Event(), trio.Event()

    async def silent(stream):
        await read_request(stream)
        arrived.set()
        if not await stream.receive_some(1):
            closed.set()

    async with serving(silent) as url, HttpClient(url) as http:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(http.request, "GET", "/")
            await arrived.wait()
            nursery.cancel_scope.cancel()
        with trio.fail_after(20):
            await closed.wait()  # the server reads the end of the connection


async def test_no_more_connections_than_allowed():
    now, most = 0, 0

    async def count(stream):
        nonlocal now, most
        async with stream:
            while await read_request(stream):
                now += 1
                most = max(most, now)
                await trio.testing.wait_all_tasks_blocked()
                now -= 1
                await stream.send_all(ok())

    async with serving(count) as url, HttpClient(url, max_connections=3) as http:
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(http.request, "GET", "/")
    assert most == 3


async def test_a_body_that_is_not_json_is_a_server_error():
    server = Scripted([ok(b"<html>")])
    async with serving(server.handle) as url, HttpClient(url) as http:
        reply = await http.request("GET", "/")
        with pytest.raises(ServerError, match="a page in HTML"):
            reply.json()


async def test_a_key_is_sent_and_shows_in_no_error():
    requests = []

    async def record(stream):
        requests.append(await stream.receive_some(65536))
        await stream.aclose()

    async with (
        serving(record) as url,
        HttpClient(url, headers={"Authorization": "Bearer sesame"}) as http,
    ):
        with pytest.raises(ServerError) as caught:
            await http.request("GET", "/")
        assert "sesame" not in str(caught.value) + repr(caught.value.__cause__) + repr(http)
    assert b"authorization: Bearer sesame" in requests[0].replace(b"Authorization", b"authorization")
    with pytest.raises(ValueError, match="Authorization") as caught:
        HttpClient("http://x", headers={"Authorization": "Bearer sesame\r\nEvil: 1"})
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://x", "http://", "http://x?y=1"])
def test_what_is_no_server_url_is_refused(url):
    with pytest.raises(ValueError, match="is not the URL of a server"):
        HttpClient(url)


async def test_https_to_a_server_without_tls_is_an_error():
    async def plain(stream):
        await stream.receive_some(100)
        await stream.send_all(b"not tls at all\r\n")
        await stream.aclose()

    async with serving(plain) as url:
        with pytest.raises(ServerError, match="cannot connect") as caught:
            await HttpClient(url.replace("http:", "https:")).request("GET", "/")
        assert isinstance(caught.value.__cause__, (ssl.SSLError, trio.BrokenResourceError))
