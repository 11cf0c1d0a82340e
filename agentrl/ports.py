"""`ReservedPort`: chooses a port before the server that will listen on it has started."""

from __future__ import annotations

import socket
from types import TracebackType


class ReservedPort:
    """A free port of this host, reserved until `release`.

    A port that was merely found free can be taken by another process before its server binds it. This port is
    bound but does not listen: the kernel assigns it to nobody who binds port 0, and connections are refused.
    A server can still bind this number with SO_REUSEADDR, as torch, trio, asyncio, uvicorn and Ray do.
    """

    def __init__(self, host: str = "") -> None:
        """host: the address that the server will bind; empty: all IPv4 addresses."""
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
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
