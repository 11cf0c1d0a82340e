"""The server of `agentrl view` before its first request."""

import socket
import urllib.parse

import pytest

from agentrl.extras.view.app import Pages
from agentrl.extras.view.server import serve


class Connected(Exception):
    """Ends the server."""


def test_whoever_has_the_address_may_connect_at_once():
    def connect(address: str) -> None:
        found = urllib.parse.urlsplit(address)
        with socket.create_connection((found.hostname, found.port), timeout=30):
            raise Connected

    with pytest.raises(Connected):
        serve(Pages([]), port=0, on_ready=connect)
