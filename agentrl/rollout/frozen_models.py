"""Frozen models, opponents and teachers on servers, before anything starts: found, and compared with the
policy.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import trio

from agentrl.chat.codec import load_tokenizer
from agentrl.chat.vocabulary import vocabulary_difference
from agentrl.config.agent import AgentConfig
from agentrl.config.distillation import TEACHER_SERVERS, DistillationConfig
from agentrl.config.frozen_servers import FrozenServersConfig
from agentrl.config.model import ModelConfig
from agentrl.config.opponents import opponent_key
from agentrl.data.model_source import resolve_model
from agentrl.errors import ConfigError, ServerError, concerning
from agentrl.rollout.limits import num_ids_of, server_key
from agentrl.servers.client import SGLangClient
from agentrl.servers.protocol import ModelInfo

QUESTION_TIMEOUT_S = 10.0

F = TypeVar("F", bound=FrozenServersConfig)


def resolve_opponents(agent: AgentConfig, policy: ModelConfig) -> AgentConfig:
    """Return the section with the local folders of all opponents that servers are started for.

    Args:
        policy: a resolved model, whose tokenizer all opponents must have.

    Raises:
        ConfigError: there is no such model, it has another tokenizer, a running server does not answer, or
            the variable with its key is not set.
    """
    opponents = {
        name: resolve_servers(opponent, policy, key=opponent_key(name))
        for name, opponent in agent.opponents.items()
    }
    return agent.model_copy(update={"opponents": opponents})


def resolve_teacher(distillation: DistillationConfig, policy: ModelConfig) -> DistillationConfig:
    """Return the section with the local folder of the teacher that servers are started for, if there is one;
    raises as `resolve_opponents`.
    """
    servers = resolve_servers(distillation.servers, policy, key=TEACHER_SERVERS)
    return distillation.model_copy(update={"servers": servers})


def resolve_servers(servers: F, policy: ModelConfig, *, key: str) -> F:
    """Return the section `key` of one frozen model; as `resolve_opponents`."""
    if servers.is_started and not (servers.model.path or policy.path):
        raise ConfigError(f"{key}: model.path is empty, and the policy has no local folder; set model.path")
    if servers.is_started:
        return _with_folder(servers, policy, key=key) if servers.model.path else servers
    api_key = server_key(servers.api_key_env, f"{key}.api_key_env")
    for url in servers.urls:
        folder = Path(
            servers.tokenizer if servers.tokenizer is not None else _named_folder(url, api_key, key)
        )
        if not (folder / "tokenizer.json").is_file():
            raise ConfigError(
                f"{key}: the server {url} names the tokenizer {str(folder)!r}, which has no tokenizer.json "
                f"here; set {key}.tokenizer to a folder with it"
            )
        _compare(folder, policy, f"{key}: the server {url}")
    return servers


def _with_folder(servers: F, policy: ModelConfig, *, key: str) -> F:
    named = servers.model
    with concerning(key):
        model = resolve_model(
            ModelConfig(path=named.path, revision=named.revision, trust_remote_code=policy.trust_remote_code)
        )
    folder = Path(model.path)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"{key}: model.path={named.path!r} has no tokenizer.json; add the policy's if the ids are its"
        )
    _compare(folder, policy, f"{key}: {named.path!r}")
    own, its = num_ids_of(policy), num_ids_of(model)
    if own is not None and its is not None and its < own:
        raise ConfigError(
            f"{key}: {named.path!r} has a vocabulary of {its:,} ids, and the policy may sample {own:,}; use "
            "a model with at least as many"
        )
    return servers.model_copy(update={"model": named.model_copy(update={"path": model.path})})


def _compare(folder: Path, policy: ModelConfig, who: str) -> None:
    own = load_tokenizer(Path(policy.tokenizer_path or policy.path))
    difference = vocabulary_difference(load_tokenizer(folder), wanted=own)
    if difference is not None:
        raise ConfigError(
            f"{who} has another tokenizer than the policy: {difference}; use a model of the same family"
        )


def _named_folder(url: str, api_key: str | None, key: str) -> str:
    info = ask_model(url, api_key, key=key)
    return info.tokenizer_path or info.model_path


def ask_model(url: str, api_key: str | None, *, key: str) -> ModelInfo:
    """Return what a running server of the frozen model `key` says of its model.

    Raises:
        ConfigError: it does not answer.
    """
    return trio.run(_model_info, url, api_key, key)


async def _model_info(url: str, api_key: str | None, key: str) -> ModelInfo:
    client = SGLangClient(url, api_key=api_key)
    try:
        with trio.fail_after(QUESTION_TIMEOUT_S):
            return await client.model_info()
    except (ServerError, trio.TooSlowError) as error:
        why = str(error) or f"no answer within {QUESTION_TIMEOUT_S:g} s"
        if isinstance(error, ServerError) and error.status is not None:
            raise ConfigError(f"{key}.urls: {url} is no server of SGLang's protocol: {why}") from error
        raise ConfigError(f"{key}.urls: the server {url} does not answer ({why}); start it first") from error
    finally:
        await client.aclose()
