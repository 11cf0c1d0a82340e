"""Checks of servers with frozen models, opponents and teachers, before a run starts."""

from __future__ import annotations

from pathlib import Path

import trio

from agentrl.chat.codec import load_tokenizer
from agentrl.chat.vocabulary import vocabulary_difference
from agentrl.config.agent import AgentConfig
from agentrl.config.distillation import DistillationConfig
from agentrl.config.frozen_servers import FrozenServersConfig
from agentrl.config.model import ModelConfig
from agentrl.errors import ConfigError, ServerError
from agentrl.rollout.limits import server_key
from agentrl.sglang.client import SGLangClient

QUESTION_TIMEOUT_S = 10.0


def check_opponents(agent: AgentConfig, policy: ModelConfig) -> None:
    """Check that the servers of all opponents answer, and have the tokenizer of `policy`, a resolved model.

    Raises:
        ConfigError: one does not, or the variable with its key is not set.
    """
    for name, opponent in agent.opponents.items():
        _check(opponent, policy, key=f"agent.opponents.{name}")


def check_teacher_servers(distillation: DistillationConfig, policy: ModelConfig) -> None:
    """Check the same of the teacher's servers, if there are any.

    Raises:
        ConfigError: one does not, or the variable with their key is not set.
    """
    _check(distillation.servers, policy, key="algorithm.distillation.servers")


def _check(servers: FrozenServersConfig, policy: ModelConfig, *, key: str) -> None:
    api_key = server_key(servers.api_key_env, f"{key}.api_key_env")
    for url in servers.urls:
        _check_server(url, policy, key=key, api_key=api_key, tokenizer=servers.tokenizer)


def _check_server(
    url: str, policy: ModelConfig, *, key: str, api_key: str | None, tokenizer: str | None
) -> None:
    folder = Path(tokenizer if tokenizer is not None else trio.run(_named_folder, url, api_key, key))
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"{key}: the server {url} names the tokenizer {str(folder)!r}, which has no tokenizer.json "
            f"here; set {key}.tokenizer to a folder with it"
        )
    own = load_tokenizer(Path(policy.tokenizer_path or policy.path))
    difference = vocabulary_difference(load_tokenizer(folder), wanted=own)
    if difference is not None:
        raise ConfigError(
            f"{key}: the server {url} has another tokenizer than the policy: {difference}; use a model of "
            "the same family"
        )


async def _named_folder(url: str, api_key: str | None, key: str) -> str:
    client = SGLangClient(url, api_key=api_key)
    try:
        with trio.fail_after(QUESTION_TIMEOUT_S):
            info = await client.model_info()
    except (ServerError, trio.TooSlowError) as error:
        why = str(error) or f"no answer within {QUESTION_TIMEOUT_S:g} s"
        raise ConfigError(f"{key}: the server {url} does not answer ({why}); start it first") from error
    finally:
        await client.aclose()
    return info.tokenizer_path or info.model_path
