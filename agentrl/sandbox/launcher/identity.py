"""Who the program runs as: never root, and as root's child nobody that owns anything on the host."""

from __future__ import annotations

import os

from . import kernel

INNER_ID = 1000
"""Its user and group inside a user namespace."""
FIRST_STRANGER = 100_000
"""Accounts of people and services have smaller numbers, nearly everywhere."""


def stranger() -> int | None:
    """Return a random user and group id without an account; None when this user namespace has no other ids."""
    extents = [_largest_extent(f"/proc/self/{kind}_map") for kind in ("uid", "gid")]
    first = max(start for start, _ in extents)
    end = min(start + count for start, count in extents)
    if end - first > 2 * FIRST_STRANGER:
        first = FIRST_STRANGER
    first = max(first, 1)
    count = min(end, 2**31) - first
    return first + int.from_bytes(os.urandom(8), "big") % count if count > 0 else None


def become(user: int) -> None:
    """Change to user and group `user`, which ends all privileges of root."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def map_self(user: int, group: int) -> None:
    """In a fresh user namespace: be INNER_ID there, and `user` for the rest of the world."""
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # after a change of user, /proc/self is root's
    for name, line in (("setgroups", "deny"), ("uid_map", f"{INNER_ID} {user} 1"), ("gid_map", f"{INNER_ID} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(line)


def renounce() -> None:
    """Give up capabilities and every way to gain some: setuid files, exec."""
    kernel.drop_bounding_set()
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)


def _largest_extent(path: str) -> tuple[int, int]:
    with open(path, encoding="ascii") as file:
        rows = [line.split() for line in file]
    return max(((int(inside), int(count)) for inside, _, count in rows), key=lambda extent: extent[1])
