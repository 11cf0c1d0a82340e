"""How many files and connections a process may have open at once."""

from __future__ import annotations

import resource


def raise_open_files(wanted: int) -> int:
    """Raise this process's soft limit to `wanted` where it is lower, as far as the hard limit goes; return the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reachable = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= reachable:
        return wanted if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
    return reachable
