"""How many trajectories the limit of open files lets a rollout actor play."""

from __future__ import annotations

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
