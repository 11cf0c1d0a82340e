"""What servers that are attached can do, asked of them before the first publish."""

from __future__ import annotations

from functools import partial

from agentrl.cluster.elastic import why_no_adapter, why_no_experts
from agentrl.cluster.servers import ServerFleet
from agentrl.config.schema import Config
from agentrl.errors import ConfigError


def confirm_adapter(config: Config, given: Config, servers: ServerFleet) -> Config:
    """Ask attached servers whether they can load the adapter; if one cannot, return the config with `merged`.

    Args:
        config: with the adapter resolved.
        given: the user's config, which may force `alone`.

    Raises:
        ConfigError: `given` forces `alone`, and a server cannot load the adapter.
        ServerError: an attached server is not up in time, or does not answer.
    """
    if config.rollout.weights.adapter != "alone" or not config.rollout.urls:
        return config
    why = servers.talk(servers.wait_until_attached(), partial(why_no_adapter, model=config.model))
    if why is None:
        return config
    if given.rollout.weights.adapter == "alone":
        raise ConfigError(f"rollout.weights.adapter=alone: {why}; use auto or merged")
    return config.with_adapter("merged")


def confirm_experts(config: Config, servers: ServerFleet) -> None:
    """Ask attached servers whether they record experts, if the learner is to replay them.

    Raises:
        ConfigError: a server does not. Otherwise every attempt on it would fail.
        ServerError: an attached server is not up in time, or does not answer.
    """
    if not config.rollout.replay_experts or not config.rollout.urls:
        return
    why = servers.talk(servers.wait_until_attached(), why_no_experts)
    if why is not None:
        raise ConfigError(f"rollout.replay_experts=true: {why}; or use rollout.replay_experts=false")
