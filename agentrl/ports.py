"""Ports that are chosen before the server that listens on them is there."""

from __future__ import annotations

import socket
from types import TracebackType


class ReservedPort:
    """A free port of this host, which nobody else is given while it is held.

    A port that is only asked for can be taken by another process until its server binds it. This one is bound, without listening: the
    kernel gives it to nobody who asks for any port, and whoever connects is refused; a server that binds this number with SO_REUSEADDR,
    as those of torch, trio, asyncio, uvicorn and Ray do, listens on it all the same.
    """

    def __init__(self, host: str = "") -> None:
        """host: the address that the server will bind; empty: all of them, IPv4."""
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Hold it no longer; a server that listens on it goes on."""
        self._socket.close()

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
