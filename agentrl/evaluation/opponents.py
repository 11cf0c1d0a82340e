"""The opponents of an evaluation: frozen models whose weights affect its results."""

from __future__ import annotations

from agentrl.config.agent import AgentConfig
from agentrl.config.opponents import OpponentConfig, opponent_key
from agentrl.errors import ConfigError
from agentrl.evaluation.attempt_keys import fingerprint
from agentrl.evaluation.model_place import identity_of
from agentrl.rollout.frozen_models import ask_model
from agentrl.rollout.limits import server_key
from agentrl.types import JsonObject

AS_EVALUATED = "as evaluated"
"""Identity of an opponent that is the policy itself, whose weights are a part of each attempt's key."""


def describe_opponents(agent: AgentConfig) -> dict[str, JsonObject]:
    """Return by name what affects an opponent's words: the identity of its weights, and its temperature.

    agent: with resolved opponents. Running servers are asked for their model.

    Raises:
        ConfigError: a running server does not answer, or the servers of an opponent have different weights.
    """
    return {
        name: {"weights": _weights_of(opponent, opponent_key(name)), "temperature": opponent.temperature}
        for name, opponent in agent.opponents.items()
    }


def _weights_of(opponent: OpponentConfig, key: str) -> str:
    if opponent.is_started:
        return fingerprint(opponent.model.path) if opponent.model.path else AS_EVALUATED
    api_key = server_key(opponent.api_key_env, f"{key}.api_key_env")
    found = {url: identity_of(ask_model(url, api_key, key=key)) for url in opponent.urls}
    if len(set(found.values())) > 1:
        shown = ", ".join(f"{url}: {weights}" for url, weights in found.items())
        raise ConfigError(
            f"{key}: its servers have different weights ({shown}); use one model on all of them"
        )
    return next(iter(found.values()))
