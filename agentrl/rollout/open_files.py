"""The limit of open files, which bounds the concurrent attempts of a rollout actor."""

from __future__ import annotations

import resource

from agentrl.errors import ConfigError

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
            f"rollout.max_concurrent_trajectories={num_trajectories} needs "
            f"{num_trajectories + OTHER_FILES} open files in a rollout actor, but a process on "
            f"this machine may have {limit} (hard limit, `ulimit -Hn`): raise the limit, or play "
            f"at most {max(0, limit - OTHER_FILES)} per actor in more actors (rollout.num_actors)"
        )


def raise_open_files(wanted: int) -> int:
    """Raise this process's soft limit to `wanted` if it is lower, at most to the hard limit.

    Return the new limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reachable = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= reachable:
        return wanted if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
    return reachable
