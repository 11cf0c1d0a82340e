"""The descendants of a process, from /proc: to sum what a program uses, and to kill all of it."""

from __future__ import annotations

import _signal as signal  # `signal` itself loads enum: milliseconds at every start
import errno
import os
import time

KILL_S, PAUSE_S = 10.0, 0.001
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def descendants(root: int) -> list[int]:
    """Return the processes below `root`, without itself.

    One that ends meanwhile may or may not be included.
    """
    found: list[int] = []
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue
        for thread in threads:
            children = read(f"/proc/{pid}/task/{thread}/children").split()
            found += map(int, children)
            waiting += map(int, children)
    return found


def usage(pids: list[int]) -> tuple[int, float]:
    """Return the memory in use, in bytes, and the CPU seconds of processes and of ended children that they
    waited for.
    """
    return sum(map(_memory_bytes, pids)), sum(map(_cpu_s, pids))


def kill_all(root: int) -> None:
    """Kill everything below `root`, which must be this process and a subreaper; return when nothing is left.

    All are stopped before any is killed; otherwise a program that forks fast enough would survive.

    Raises:
        OSError: a process did not end within KILL_S.
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
    """Return the number of threads of a user on this machine."""
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
    """Reap the children that have ended; return whether others remain."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _memory_bytes(pid: int) -> int:
    kilobytes = 0
    for line in read(f"/proc/{pid}/status").splitlines():
        if line.startswith(("RssAnon:", "RssShmem:", "VmSwap:")):
            kilobytes += int(line.split()[1])
    return kilobytes * 1024


def _cpu_s(pid: int) -> float:
    fields = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS_PER_S if len(fields) > 15 else 0.0


def read(path: str) -> str:
    """Return the text of a file of the kernel; "" if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""  # the process has ended, or the controller is not there
