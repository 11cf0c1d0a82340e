"""The self-test inside the sandbox: tries what no program may do and prints the results as JSON.

It runs as source text, not as a module. stdin: the bait of the host, a JSON object.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

PR_SET_NAME, PR_GET_SECCOMP, PR_GET_NO_NEW_PRIVS = 15, 21, 39
CLONE_NEWUSER = 0x10000000
libc = ctypes.CDLL(None, use_errno=True)


def succeeds(function: Callable[..., object], *args: Any) -> bool:
    """Return whether the call was allowed."""
    try:
        function(*args)
    except (OSError, MemoryError):
        return False
    return True


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(1)


def write(folder: str) -> None:
    with open(os.path.join(folder, ".agentrl-sandbox-probe"), "wb"):
        pass


def changes(path: str) -> bool:
    """Return whether the times or permissions of a file can be changed.

    Checks the file: success may be faked.
    """
    try:
        before = os.stat(path)
    except OSError:
        return False
    succeeds(os.utime, path, (0, 0))
    succeeds(os.utime, path)
    succeeds(os.chmod, path, 0o600)
    after = os.stat(path)
    return (before.st_mode, before.st_mtime_ns) != (after.st_mode, after.st_mtime_ns)


def connect(family: int, address: str | tuple[str, int]) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(2)
        client.connect(address)


def start(function: Callable[..., object], *args: Any) -> None:
    """Run the function in a child process that exits afterwards, whatever happens."""
    if os.fork() == 0:
        try:
            function(*args)
        finally:
            os._exit(0)


def lose_a_process(name: str) -> bool:
    """Leave a daemon behind, in a session of its own; return whether it was started."""
    ready, told = os.pipe()

    def daemon() -> None:
        label = ctypes.create_string_buffer(name.encode())
        libc.prctl(PR_SET_NAME, ctypes.addressof(label), 0, 0, 0)
        os.write(told, b"1")
        os.read(os.pipe()[0], 1)

    def parent() -> None:
        os.setsid()
        start(daemon)

    start(parent)
    os.close(told)
    return os.read(ready, 1) == b"1"


def count_forks(most: int) -> int:
    """Start up to `most` processes that wait until this one exits; return how many were allowed."""
    waiting, held_open = os.pipe()

    def wait() -> None:
        os.close(held_open)
        os.read(waiting, 1)

    for number in range(most):
        try:
            start(wait)
        except OSError:
            return number
    return most


def grow_file(size: int) -> None:
    with open("probe", "wb") as file:
        try:
            file.truncate(size)
        finally:
            os.unlink("probe")


def main() -> None:
    bait = json.loads(sys.stdin.read())
    in_own_namespace = os.getppid() == 1 and os.getpid() < 8
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    folders = ("/", "/etc", "/usr/lib", "/var/tmp", "/run", os.path.dirname(os.__file__), bait["folder"])
    space = os.statvfs(".")
    facts = {
        "reads": succeeds(read, bait["file"]),
        "writes": [folder for folder in folders if succeeds(write, folder)],
        "changes": changes(bait["file"]),
        "connects": succeeds(connect, socket.AF_INET, ("127.0.0.1", bait["port"])),
        "connects_abstract": succeeds(connect, socket.AF_UNIX, "\0" + bait["name"]),
        "signals": not in_own_namespace and succeeds(os.kill, bait["pid"], 0),
        "is_root": os.getuid() == 0 or os.geteuid() == 0 or succeeds(os.setuid, 0),
        "gains_privileges": libc.prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1,
        "has_filter": libc.prctl(PR_GET_SECCOMP, 0, 0, 0, 0) == 2,
        "makes_namespaces": libc.unshare(CLONE_NEWUSER) == 0,
        "changes_root": succeeds(os.chroot, "/"),
        "allocates": succeeds(bytearray, bait["memory_bytes"]),
        "grows_file": succeeds(grow_file, bait["file_bytes"] + 1),
        "disk_bytes": space.f_blocks * space.f_frsize,
    }
    try:
        facts["lost"] = lose_a_process(bait["name"])
    except OSError:
        facts["lost"] = False
    facts["forks"] = count_forks(bait["max_processes"] + 8)
    sys.stdout.write(json.dumps(facts))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
