"""What the config says about model and servers that only their files and the environment tell."""

from __future__ import annotations

import os
from pathlib import Path

from agentrl.chat.chat import Chat
from agentrl.chat.template import read_json
from agentrl.config.model import ModelConfig
from agentrl.errors import ConfigError
from agentrl.http.open_files import raise_open_files

OTHER_FILES = 256
"""Open files of a rollout actor beside connections to servers: Ray's, libraries', pipes of sandboxes, rewards and MCP servers."""


def allow_trajectories(num_trajectories: int) -> None:
    """Raise this process's limit of open files to what so many trajectories need: a connection to a server each, and one to a tool.

    Raises:
        ConfigError: the machine does not even allow the former.
    """
    limit = raise_open_files(2 * num_trajectories + OTHER_FILES)
    if limit < num_trajectories + OTHER_FILES:
        raise ConfigError(
            f"rollout.max_concurrent_trajectories={num_trajectories} needs {num_trajectories + OTHER_FILES} open files in a rollout actor, "
            f"and a process on this machine may have {limit} (the hard limit, `ulimit -Hn`): raise it, or play at most "
            f"{max(0, limit - OTHER_FILES)} per actor, in more actors (rollout.num_actors)"
        )


def model_limits(model: ModelConfig, chat: Chat) -> tuple[int | None, int | None]:
    """Return how many ids the model knows, and its context in tokens, from its `config.json`.

    None instead of the first: the tokenizer has no other ids. None instead of the second: unknown, for the file is not here
    (servers elsewhere, only the tokenizer here).
    """
    described = read_json(Path(model.path) / "config.json")
    text_model = described.get("text_config") or described
    vocab_size = text_model.get("vocab_size")
    context_tokens = text_model.get("max_position_embeddings")
    has_foreign_ids = isinstance(vocab_size, int) and vocab_size < chat.vocab_size
    return (vocab_size if has_foreign_ids else None), (context_tokens if isinstance(context_tokens, int) else None)


def server_key(variable: str | None) -> str | None:
    """Return the key of the inference servers, None when `rollout.api_key_env` names no variable; raise ConfigError when it is not set."""
    if variable is None:
        return None
    if variable not in os.environ:
        raise ConfigError(f"rollout.api_key_env={variable!r}: this environment variable is not set")
    return os.environ[variable]
