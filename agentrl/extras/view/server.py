"""Serves the page until Ctrl-C."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable

import uvicorn

from agentrl.errors import UserError
from agentrl.extras.view.app import Pages, build_app

HOST = "127.0.0.1"
_KEY_BYTES = 16
_GRACE_S = 1


def new_key() -> str:
    """Return a key that nobody guesses."""
    return secrets.token_urlsafe(_KEY_BYTES)


def serve(pages: Pages, *, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve until Ctrl-C; `on_ready` gets the address of the page, key included.

    Raises:
        UserError: the port is taken.
    """
    key = new_key()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError as error:
            raise UserError(f"--port={port}: {error.strerror}; choose another, or 0 for any") from error
        listener.listen()  # whoever has the address may connect at once, and waits for the first answer
        on_ready(f"http://{HOST}:{listener.getsockname()[1]}/{key}/")
        settings = uvicorn.Config(
            build_app(pages, key),
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_GRACE_S,
        )
        uvicorn.Server(settings).run(sockets=[listener])
