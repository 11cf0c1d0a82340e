"""Resolves `rollout.weights.adapter=auto`: whether a LoRA adapter is published alone or merged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import trio

from agentrl.config.schema import Config
from agentrl.errors import ConfigError, ServerError
from agentrl.fleet.servers import ServerFleet
from agentrl.rollout.trio_run import in_trio
from agentrl.sglang.client import SGLangClient

ASK_TIMEOUT_S = 30.0


def resolve_adapter(config: Config) -> Config:
    """Return the config with `auto` replaced by `alone`, or by `merged` if the config rules `alone` out."""
    if config.rollout.weights.adapter != "auto":
        return config
    return _with(config, "alone" if config.why_merged is None else "merged")


def confirm_adapter(config: Config, given: Config, servers: ServerFleet) -> Config:
    """Ask attached servers whether they can load the adapter; if one cannot, return the config with `merged`.

    Args:
        config: after `resolve_adapter`.
        given: the user's config, which may force `alone`.

    Raises:
        ConfigError: `given` forces `alone`, and a server cannot load the adapter.
        ServerError: an attached server is not up in time, or does not answer.
    """
    if config.rollout.weights.adapter != "alone" or not config.rollout.urls:
        return config
    why = in_trio(why_no_adapter, servers.clients(servers.wait_until_attached()), config)
    if why is None:
        return config
    if given.rollout.weights.adapter == "alone":
        raise ConfigError(f"rollout.weights.adapter=alone: {why}; use auto or merged")
    return _with(config, "merged")


async def why_no_adapter(clients: Sequence[SGLangClient], config: Config) -> str | None:
    """Return why a server cannot load the adapter of `config` alone; None if all can. Closes the clients.

    Raises:
        ServerError: a server did not answer within ASK_TIMEOUT_S.
    """
    reasons: list[str] = []
    for client in clients:
        try:
            with trio.fail_after(ASK_TIMEOUT_S):
                reasons += await _objections(client, config)
        except trio.TooSlowError:
            raise ServerError(f"{client.url} did not say within {ASK_TIMEOUT_S:g} s whether it loads LoRA adapters") from None
        finally:
            await client.aclose()
    return reasons[0] if reasons else None


async def _objections(client: SGLangClient, config: Config) -> list[str]:
    rank, support = config.model.lora.rank, await client.adapter_support()
    if support.max_rank < rank:
        able = f"adapters up to rank {support.max_rank}" if support.max_rank else "no LoRA adapters"
        return [f"{client.url} loads {able}, and model.lora.rank is {rank}"]
    served = (await client.model_info()).model_path
    if not _is_same(served, config.model.path):
        return [f"{client.url} serves {served!r}, and the adapter is of model.path={config.model.path!r}"]
    return []


def _is_same(one: str, other: str) -> bool:
    return one == other or Path(one).resolve() == Path(other).resolve()


def _with(config: Config, adapter: str) -> Config:
    weights = config.rollout.weights.model_copy(update={"adapter": adapter})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"weights": weights})})
