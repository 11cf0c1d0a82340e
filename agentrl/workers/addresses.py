"""Where ranks meet."""

from __future__ import annotations

import socket
from contextlib import closing


def find_free_port() -> int:
    """Return a port of this host that is free at this moment, on all its addresses."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port
