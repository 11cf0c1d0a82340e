"""Model limits and server keys, read from the model's files and the environment."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.chat.chat import Chat
from agentrl.chat.template import read_json
from agentrl.config.model import ModelConfig
from agentrl.errors import ConfigError


def model_limits(model: ModelConfig, chat: Chat) -> tuple[int | None, int | None]:
    """Return the model's vocabulary size and its context in tokens, from its `config.json`.

    The size is None if the tokenizer has no ids beyond it, so that no check is needed. The context is None if
    it is unknown: the servers run elsewhere, and only the tokenizer is available here.
    """
    vocab_size, context_tokens = num_ids_of(model), _text_model(model).get("max_position_embeddings")
    has_foreign_ids = vocab_size is not None and vocab_size < chat.vocab_size
    return (vocab_size if has_foreign_ids else None), (
        context_tokens if isinstance(context_tokens, int) else None
    )


def num_ids_of(model: ModelConfig) -> int | None:
    """Return the model's vocabulary size, regardless of the tokenizer; None if `config.json` does not contain
    it.
    """
    vocab_size = _text_model(model).get("vocab_size")
    return vocab_size if isinstance(vocab_size, int) else None


def _text_model(model: ModelConfig) -> Mapping[str, Any]:
    described = read_json(Path(model.path) / "config.json")
    return described.get("text_config") or described


def server_key(variable: str | None, key: str = "rollout.api_key_env") -> str | None:
    """Return the API key of inference servers; None if the config's `key` names no variable.

    Raises:
        ConfigError: the named variable is not set.
    """
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ConfigError(f"{key}={variable!r}: this environment variable is not set")
    return os.environ[variable]


def key_of_started(variable: str | None) -> str:
    """Return the API key for servers started here: the key from the named variable, or else a random one.

    Raises:
        ConfigError: the named variable is not set.
    """
    return server_key(variable) or secrets.token_urlsafe(32)
