"""The limit of open files, which bounds the concurrent attempts of a rollout actor."""

from __future__ import annotations

from agentrl.errors import ConfigError
from agentrl.http.open_files import raise_open_files

OTHER_FILES = 256
"""Open files of a rollout actor except server connections: Ray, libraries, pipes of sandboxes, rewards and
MCP servers.
"""


def allow_trajectories(num_trajectories: int) -> None:
    """Raise this process's limit of open files so that each attempt can have a server and a tool connection.

    Raises:
        ConfigError: the machine does not even allow one connection per attempt.
    """
    limit = raise_open_files(2 * num_trajectories + OTHER_FILES)
    if limit < num_trajectories + OTHER_FILES:
        raise ConfigError(
            f"rollout.max_concurrent_trajectories={num_trajectories} needs {num_trajectories + OTHER_FILES} open files in a rollout actor, "
            f"and a process on this machine may have {limit} (the hard limit, `ulimit -Hn`): raise it, or play at most "
            f"{max(0, limit - OTHER_FILES)} per actor, in more actors (rollout.num_actors)"
        )
