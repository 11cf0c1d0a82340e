"""The gateway as the rollout sees it: what is registered as `openai` of `agentrl.gateways`."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol, cast

from agentrl.chat.chat import Chat
from agentrl.config.agent import GatewayConfig
from agentrl.plugins import OpenAIEndpoint
from agentrl.registered import registered, required

if TYPE_CHECKING:  # a session is served by the gateway that it has
    from agentrl.rollout.session import TrajectorySession

GROUP, NAME = "agentrl.gateways", "openai"


class Door(Protocol):
    """Serves attempts to external programs."""

    def serve(
        self, session: TrajectorySession, chat: Chat
    ) -> AbstractAsyncContextManager[tuple[OpenAIEndpoint, list[Exception]]]:
        """Serve an attempt while the context is open. Yields its endpoint, and the list to which failures are
        appended that are not the program's.

        Raises:
            ConfigError: the gateway cannot listen as `agent.gateway` says.
        """


class _NoGateway:
    def serve(
        self, session: TrajectorySession, chat: Chat
    ) -> AbstractAsyncContextManager[tuple[OpenAIEndpoint, list[Exception]]]:
        required(GROUP, NAME, by="session.serve_openai")
        raise AssertionError("it was installed meanwhile")


def open_gateway(config: GatewayConfig) -> Door:
    """Return a gateway; without one that is installed, one that says so when it is used.

    Raises:
        ConfigError: this machine cannot listen where `config` says.
    """
    installed = _installed()
    return _NoGateway() if installed is None else cast(Door, installed(config))


def check_address(config: GatewayConfig) -> None:
    """Raise ConfigError if this machine cannot listen where `config` says."""
    if (installed := _installed()) is not None:
        installed.check_address(config)


def check_certificate(config: GatewayConfig) -> None:
    """Raise ConfigError if the certificate and the key of `config` cannot be used."""
    installed = _installed()
    if installed is not None and config.certificate is not None and config.private_key is not None:
        installed.check_certificate(config.certificate, config.private_key)


def _installed() -> Any:
    one = registered(GROUP).get(NAME)
    return None if one is None else one.load()
