"""The limit of open files and connections of a process."""

from __future__ import annotations

import resource


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
