"""Where the gateway of a process listens, and what programs need to reach it."""

from __future__ import annotations

import socket
import ssl
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from agentrl.config.agent import GatewayConfig
from agentrl.errors import ConfigError
from agentrl.extras.gateway.certificates import make_self_signed, new_folder, server_context, write_bundle
from agentrl.loopback import is_local
from agentrl.plugins import OpenAIEndpoint

WILDCARDS = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True, eq=False)
class GatewayAddress:
    """An open gateway.

    Attributes:
        url: its address without a path, as programs reach it.
        certificate: path of a self-signed certificate; None: there is none.
        trusted: path of what a program may trust instead of the machine's own certificates, to trust the
            self-signed one as well.
        folder: holds these files as long as the gateway is open.
    """

    listeners: Sequence[trio.abc.Listener[trio.abc.Stream]]
    url: str
    is_on_loopback: bool
    certificate: str | None = None
    trusted: str | None = None
    folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def opens(self) -> str | None:
        """What the gateway opens to others than this machine; None: nothing."""
        if self.is_on_loopback:
            return None
        risk = (
            "keys and conversations are encrypted"
            if self.url.startswith("https")
            else "keys and conversations are NOT encrypted (agent.gateway.tls)"
        )
        return (
            f"the gateway listens on {self.url}: whoever reaches it and has the key of a running attempt may "
            f"sample as that attempt, and do nothing else; {risk}"
        )

    def endpoint(self, key: str, model: str) -> OpenAIEndpoint:
        """Return what a program needs to play the attempt with this key."""
        return OpenAIEndpoint(
            f"{self.url}/v1", key, model, certificate=self.certificate, trusted=self.trusted
        )


def check_address(config: GatewayConfig) -> None:
    """Check that this machine can listen where `agent.gateway` says, before an attempt needs it.

    Raises:
        ConfigError: the host is not one of this machine, or every port is taken.
    """
    failure: OSError | UnicodeError | None = None
    for port in config.ports:
        try:
            _bind(config.host, port)
            return
        except (OSError, UnicodeError) as error:
            failure = error
    raise _unusable(config, failure) from failure


def _bind(host: str, port: int) -> None:
    """Bind the addresses of `host` and release them. Raises OSError, UnicodeError."""
    for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)


def _unusable(config: GatewayConfig, error: Exception | None) -> ConfigError:
    last = f" to {config.ports[-1]}" if config.num_ports > 1 else ""
    return ConfigError(
        f"agent.gateway.host={config.host!r}, port={config.port}{last}: the gateway cannot listen there "
        f"({error}); use an address of this machine, and port 0 for a free one"
    )


async def _listeners(config: GatewayConfig) -> list[trio.SocketListener]:
    """Listen on the first port that is free. Raises ConfigError."""
    failure: OSError | None = None
    for port in config.ports:
        try:
            return await trio.open_tcp_listeners(port, host=config.host)
        except OSError as error:
            failure = error
    raise _unusable(config, failure) from failure


async def listen(config: GatewayConfig) -> GatewayAddress:
    """Open the gateway's port.

    Raises:
        ConfigError: the host is not one of this machine, every port is taken, or the certificate cannot be
            used.
    """
    listeners = await _listeners(config)
    host = config.advertised_host or _reached_by(config.host)
    port = listeners[0].socket.getsockname()[1]
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    is_on_loopback = is_local(config.host)
    if config.tls == "none":
        return GatewayAddress(listeners, f"http://{place}", is_on_loopback)
    folder: tempfile.TemporaryDirectory[str] | None = None
    certificate, key, trusted = config.certificate, config.private_key, None
    if config.tls == "self_signed":
        folder = new_folder()
        names = dict.fromkeys([host, "localhost", "127.0.0.1", socket.gethostname()])
        certificate, key = make_self_signed(list(names), Path(folder.name))
        trusted = write_bundle(certificate, Path(folder.name))
    assert certificate is not None, "GatewayConfig requires both"
    assert key is not None, "GatewayConfig requires both"
    secured = [_secured(listener, server_context(certificate, key)) for listener in listeners]
    own = certificate if config.tls == "self_signed" else None
    return GatewayAddress(secured, f"https://{place}", is_on_loopback, own, trusted, folder)


def _secured(listener: trio.SocketListener, context: ssl.SSLContext) -> trio.abc.Listener[trio.abc.Stream]:
    return trio.SSLListener(listener, context, https_compatible=True)


def _reached_by(host: str) -> str:
    """Return the name by which others reach a host that the gateway listens on."""
    return socket.gethostname() if host in WILDCARDS else host
