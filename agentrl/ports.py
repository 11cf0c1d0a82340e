"""`ReservedPort`: chooses a port before the server that will listen on it has started."""

from __future__ import annotations

import socket
from types import TracebackType


class ReservedPort:
    """A port that is free on all addresses of this host, IPv4 and IPv6, reserved until `release`.

    A port that was merely found free can be taken by another process before its server binds it. This port is
    bound but does not listen: the kernel assigns it to nobody who binds port 0, and connections are refused.
    A server can still bind this number with SO_REUSEADDR, as torch, trio, asyncio, uvicorn and Ray do, on one
    address or, like torch, on all.
    """

    def __init__(self) -> None:
        self._socket = _bind_all_addresses()
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Release the port; a server that already listens on it keeps it."""
        self._socket.close()

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _bind_all_addresses() -> socket.socket:
    """Bind a free port; only on IPv4 where the host has no IPv6."""
    try:
        return _bind(socket.AF_INET6)
    except OSError:
        return _bind(socket.AF_INET)


def _bind(family: socket.AddressFamily) -> socket.socket:
    bound = socket.socket(family)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # IPv4 too
        bound.bind(("", 0))
    except OSError:
        bound.close()
        raise
    return bound
