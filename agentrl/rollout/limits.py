"""What the config says about model and servers that only their files and the environment tell."""

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
    """Return how many ids the model knows, and its context in tokens, from its `config.json`.

    None instead of the first: the tokenizer has no other ids. None instead of the second: unknown, for the file is not here
    (servers elsewhere, only the tokenizer here).
    """
    vocab_size, context_tokens = num_ids_of(model), _text_model(model).get("max_position_embeddings")
    has_foreign_ids = vocab_size is not None and vocab_size < chat.vocab_size
    return (vocab_size if has_foreign_ids else None), (context_tokens if isinstance(context_tokens, int) else None)


def num_ids_of(model: ModelConfig) -> int | None:
    """Return how many ids the model knows, whatever those of the tokenizer are; None when its `config.json` does not say so."""
    vocab_size = _text_model(model).get("vocab_size")
    return vocab_size if isinstance(vocab_size, int) else None


def _text_model(model: ModelConfig) -> Mapping[str, Any]:
    described = read_json(Path(model.path) / "config.json")
    return described.get("text_config") or described


def server_key(variable: str | None) -> str | None:
    """Return the key of the inference servers, None when `rollout.api_key_env` names no variable; raise ConfigError when it is not set."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ConfigError(f"rollout.api_key_env={variable!r}: this environment variable is not set")
    return os.environ[variable]


def key_of_started(variable: str | None) -> str:
    """Return the key for servers that are started here: the named one, else one that nobody knew before.

    Raises:
        ConfigError: the named one is not set.
    """
    return server_key(variable) or secrets.token_urlsafe(32)
