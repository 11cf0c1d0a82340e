"""The user of a program: never root. Under a root launcher, an id that owns nothing on the host."""

from __future__ import annotations

import os

from . import kernel

INNER_ID = 1000
"""The program's user and group id inside a user namespace."""
FIRST_STRANGER = 100_000
"""Real accounts have smaller ids on nearly every machine."""


def stranger() -> int | None:
    """Return a random user and group id without an account; None if this user namespace has no other ids."""
    extents = [_largest_extent(f"/proc/self/{kind}_map") for kind in ("uid", "gid")]
    first = max(start for start, _ in extents)
    end = min(start + count for start, count in extents)
    if end - first > 2 * FIRST_STRANGER:
        first = FIRST_STRANGER
    first = max(first, 1)
    count = min(end, 2**31) - first
    return first + int.from_bytes(os.urandom(8), "big") % count if count > 0 else None


def become(user: int) -> None:
    """Switch to user and group `user`, which drops all privileges of root."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def map_self(user: int, group: int) -> None:
    """Map the ids of a new user namespace: INNER_ID inside is `user` and `group` outside."""
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # after a change of user, /proc/self would belong to root
    for name, line in (
        ("setgroups", "deny"),
        ("uid_map", f"{INNER_ID} {user} 1"),
        ("gid_map", f"{INNER_ID} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(line)


def renounce() -> None:
    """Drop all capabilities, and all ways to gain some: setuid files and exec."""
    kernel.drop_bounding_set()
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)


def _largest_extent(path: str) -> tuple[int, int]:
    with open(path, encoding="ascii") as file:
        rows = [line.split() for line in file]
    return max(((int(inside), int(count)) for inside, _, count in rows), key=lambda extent: extent[1])
