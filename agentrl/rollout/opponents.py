"""Opponents: frozen models, on servers of their own, that speak in conversations in place of the policy.

What they say is context for the policy. Their tokens are not recorded and never trained on.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.config.opponents import OpponentConfig, without_server
from agentrl.errors import PluginError, ServerError
from agentrl.rollout.frozen_servers import FrozenServers
from agentrl.rollout.limits import server_key
from agentrl.rollout.server import Client
from agentrl.sglang.client import SGLangClient
from agentrl.types import Generation, SamplingParams

Connect = Callable[[str, str | None], Client]
"""(URL, API key) -> client of a frozen server."""


def connect_frozen(url: str, key: str | None) -> Client:
    """Return the client of a server whose weights nobody publishes."""
    return SGLangClient(url, api_key=key, unpublished=0)


@dataclass(frozen=True, slots=True, eq=False)
class Opponent:
    """A frozen model by its name in `agent.opponents`."""

    name: str
    temperature: float
    servers: FrozenServers[Client]

    async def generate(
        self, input_ids: Sequence[int], params: SamplingParams, *, trajectory_key: str
    ) -> Generation:
        """Sample one whole turn.

        Raises:
            RequestRefused: a server calls the request invalid.
            ServerError: servers failed or interrupted the turn repeatedly.
        """

        async def whole_turn(client: Client) -> Generation:
            rid = f"{trajectory_key}-o{secrets.token_hex(4)}"
            generation = await client.generate(input_ids, params, rid=rid)
            if generation.finish_reason == "abort":
                raise ServerError("a server of a frozen model interrupted a turn; nobody may pause it")
            return generation

        return await self.servers.ask(whole_turn)


class Opponents:
    """The opponents of a process. Their connections are opened when a conversation first needs them."""

    def __init__(self, configs: Mapping[str, OpponentConfig], connect: Connect = connect_frozen) -> None:
        self._configs = configs
        self._connect = connect
        self._opened: dict[str, Opponent] = {}

    def find(self, name: str) -> Opponent:
        """Return the opponent `name`.

        Raises:
            PluginError: `agent.opponents` does not name its servers.
            ConfigError: the variable with its key is not set.
        """
        if name not in self._opened:
            if name not in self._configs:
                raise PluginError(without_server(name, self._configs))
            config = self._configs[name]
            key = server_key(config.api_key_env, f"agent.opponents.{name}.api_key_env")
            servers = FrozenServers([self._connect(url, key) for url in config.urls])
            self._opened[name] = Opponent(name, config.temperature, servers)
        return self._opened[name]

    async def aclose(self) -> None:
        """Close all connections."""
        while self._opened:
            _, opponent = self._opened.popitem()
            await opponent.servers.aclose()
