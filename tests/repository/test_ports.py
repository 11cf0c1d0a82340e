"""A reserved port is given to nobody else, and its server listens on it all the same."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from datetime import timedelta
from functools import partial

import pytest
import trio
from torch.distributed import TCPStore

from agentrl.ports import ReservedPort

HOSTS = ["127.0.0.1", "::1"]


@pytest.fixture
def port():
    with ReservedPort() as reserved:
        yield reserved.number


@pytest.fixture(params=HOSTS, ids=["IPv4", "IPv6"])
def host(request):
    """The address on which the server listens."""
    return request.param


def other_socket(host):
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)


@pytest.mark.parametrize("other_host", [*HOSTS, "0.0.0.0", "::"])
def test_nobody_else_is_given_it(other_host):
    """All free ports of this machine but one, whoever asks, on whichever address: as a server does, as a
    client does, and by this class.
    """
    with ReservedPort() as reserved:
        for reuse in (0, 1):
            for _ in range(2000):
                with other_socket(other_host) as other:
                    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                    other.bind((other_host, 0))
                    assert other.getsockname()[1] != reserved.number
        with other_socket(other_host) as other, pytest.raises(OSError, match="in use"):
            other.bind((other_host, reserved.number))
        held = [ReservedPort() for _ in range(100)]
        assert len({reserved.number, *(port.number for port in held)}) == 101
        for port in held:
            port.release()


@pytest.mark.parametrize("other_host", HOSTS)
def test_what_another_holds_on_one_address_is_not_reserved(other_host):
    """A number that others hold on one address only would make a server of all addresses fail."""
    taken = []
    try:
        for _ in range(1000):
            taken.append(other_socket(other_host))
            taken[-1].bind((other_host, 0))
        numbers = {other.getsockname()[1] for other in taken}
        for _ in range(1000):
            with ReservedPort() as reserved:
                assert reserved.number not in numbers
    finally:
        for other in taken:
            other.close()


def test_a_host_without_ipv6_reserves_on_ipv4(monkeypatch):
    families = []

    class Ipv4Only(socket.socket):
        def bind(self, address):
            families.append(self.family)
            if self.family == socket.AF_INET6:
                raise OSError("no IPv6 here")
            super().bind(address)

    monkeypatch.setattr("agentrl.ports.socket.socket", Ipv4Only)
    with ReservedPort() as reserved:
        assert reserved.number > 0
    assert families == [socket.AF_INET6, socket.AF_INET]


def test_who_connects_before_the_server_is_there_is_refused(port, host):
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port), timeout=5)


def test_torch_meets_there(port, host):
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    TCPStore(host, port, is_master=False, timeout=timedelta(seconds=20)).set("a", "b")
    assert store.get("a") == b"b"


async def test_a_server_of_trio_listens_there(port, host):
    async with trio.open_nursery() as nursery:
        await nursery.start(
            partial(trio.serve_tcp, host=host), lambda stream: stream.send_all(b"hello"), port
        )
        async with await trio.open_tcp_stream(host, port) as stream:
            assert await stream.receive_some() == b"hello"
        nursery.cancel_scope.cancel()


def test_a_server_of_asyncio_listens_there(port, host):
    async def play():
        async with await asyncio.start_server(lambda _, writer: writer.close(), host, port):
            reader, writer = await asyncio.open_connection(host, port)
            assert await reader.read() == b""
            writer.close()

    asyncio.run(play())


ANSWER = (
    "import socket, sys; socket.create_server(('127.0.0.1', int(sys.argv[1]))).accept()[0].sendall(b'hello')"
)


def test_a_process_that_is_told_the_number_listens_there_also_after_the_release():
    with ReservedPort() as reserved:
        process = subprocess.Popen([sys.executable, "-S", "-c", ANSWER, str(reserved.number)])
        while True:
            try:
                connection = socket.create_connection(("127.0.0.1", reserved.number), timeout=60)
            except ConnectionRefusedError:
                assert process.poll() is None
                continue
            break
    with connection:
        assert connection.recv(5) == b"hello"
    assert process.wait(timeout=60) == 0
