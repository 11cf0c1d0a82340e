"""Opponents: frozen models, on servers of their own, that speak in conversations in place of the policy.

What they say is context for the policy. Their tokens are not recorded and never trained on.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.config.opponents import OpponentConfig, opponent_key, without_server
from agentrl.errors import PluginError, ServerError
from agentrl.rollout.frozen_servers import FrozenServers, StartedKeys
from agentrl.rollout.limits import server_key
from agentrl.servers.client import SGLangClient
from agentrl.servers.server import Client
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
                raise ServerError("a server of a frozen model interrupted a turn; only its run may pause it")
            return generation

        return await self.servers.ask(whole_turn)


class Opponents:
    """The opponents of a process. Their connections are opened when a conversation first needs them.

    Args:
        patience_s: how long a turn waits for the restart of a server that was started for an opponent.
    """

    def __init__(
        self,
        configs: Mapping[str, OpponentConfig],
        connect: Connect = connect_frozen,
        *,
        patience_s: float = 0.0,
    ) -> None:
        self._configs = configs
        self._connect = connect
        self._patience_s = patience_s
        self._started: StartedKeys = {}
        self._opened: dict[str, Opponent] = {}

    def find(self, name: str) -> Opponent:
        """Return the opponent `name`.

        Raises:
            PluginError: `agent.opponents` does not name it.
            ConfigError: the variable with the key of its servers is not set.
        """
        if name not in self._opened:
            if name not in self._configs:
                raise PluginError(without_server(name, self._configs))
            config = self._configs[name]
            self._opened[name] = Opponent(name, config.temperature, self._servers(name, config))
        return self._opened[name]

    def set_servers(self, started: StartedKeys) -> None:
        """Use these servers for the opponents that servers are started for."""
        self._started = started
        for name, opponent in self._opened.items():
            if self._configs[name].is_started:
                opponent.servers.set_servers(started.get(opponent_key(name), {}))

    def _servers(self, name: str, config: OpponentConfig) -> FrozenServers[Client]:
        key = opponent_key(name)
        if config.is_started:
            return FrozenServers(self._connect, self._started.get(key, {}), patience_s=self._patience_s)
        return FrozenServers(
            self._connect, dict.fromkeys(config.urls, server_key(config.api_key_env, f"{key}.api_key_env"))
        )

    async def aclose(self) -> None:
        """Close all connections."""
        while self._opened:
            _, opponent = self._opened.popitem()
            await opponent.servers.aclose()
