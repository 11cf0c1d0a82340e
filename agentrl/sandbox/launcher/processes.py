"""What runs below a process, read from /proc: for limits that hold for all of a program together, and for the last kill."""

from __future__ import annotations

import _signal as signal  # `signal` itself loads enum: milliseconds at every start
import errno
import os
import time

KILL_S, PAUSE_S = 10.0, 0.001
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Usage:
    """Memory held and CPU time used by a process and all below it, those that ended and were waited for included."""

    def __init__(self) -> None:
        self.memory_bytes = 0
        self.cpu_s = 0.0


def descendants(root: int) -> list[int]:
    """Return the processes below `root`, itself not included; what ends meanwhile may or may not be among them."""
    found: list[int] = []
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue
        for thread in threads:
            children = _read(f"/proc/{pid}/task/{thread}/children").split()
            found += map(int, children)
            waiting += map(int, children)
    return found


def usage(pids: list[int]) -> Usage:
    total = Usage()
    for pid in pids:
        total.memory_bytes += _memory_bytes(pid)
        total.cpu_s += _cpu_s(pid)
    return total


def kill_all(root: int) -> None:
    """Kill everything below `root`, which is this process and a subreaper, and return when nothing is left.

    Stopped first, then killed: a process that forks faster than it is found would win otherwise.

    Raises:
        OSError: something does not die.
    """
    deadline = time.monotonic() + KILL_S
    while _has_children():
        if time.monotonic() > deadline:
            raise OSError(errno.EBUSY, "processes of the program do not end")
        alive = descendants(root)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in alive:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
        time.sleep(PAUSE_S)


def count_of_user(user: int) -> int:
    """Return how many threads of a user the machine has."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == user:
                    total += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue
    return total


def _has_children() -> bool:
    """Wait for the children that ended; tell whether there are any others."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _memory_bytes(pid: int) -> int:
    kilobytes = 0
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith(("RssAnon:", "RssShmem:", "VmSwap:")):
            kilobytes += int(line.split()[1])
    return kilobytes * 1024


def _cpu_s(pid: int) -> float:
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS_PER_S if len(fields) > 15 else 0.0


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""  # it ended meanwhile
