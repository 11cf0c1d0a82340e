"""A control group for one execution, if the machine allows one: the kernel then limits memory and
processes.
"""

from __future__ import annotations

import os

from .processes import read

PREFIX = "agentrl-sandbox-"
"""Of groups of launchers: their process id follows."""
BOX_PREFIX = "agentrl-box-"
"""Of groups of boxes: their owner's process id and a number follow."""
FILES = {  # controller: (its limit's file in version 2, in version 1)
    "memory": ("memory.max", "memory.limit_in_bytes"),
    "pids": ("pids.max", "pids.max"),
}


class ControlGroup:
    """The control groups of one program: one in version 2, one per controller in version 1."""

    def __init__(self, folders: dict[str, str]) -> None:
        self._folders = folders

    @classmethod
    def make(cls, *, memory_bytes: int, max_processes: int, box: int | None = None) -> ControlGroup:
        """Create groups for the controllers that this process may delegate; possibly none.

        box: tells the boxes of this process apart; None: it is a launcher, with one group of its own.
        """
        name = f"{PREFIX}{os.getpid()}" if box is None else f"{BOX_PREFIX}{os.getpid()}-{box}"
        limits = {"memory": memory_bytes, "pids": max_processes}
        folders: dict[str, str] = {}
        for controller, (parent, version) in _parents().items():
            folder = f"{parent}/{name}"
            _sweep(parent)
            try:
                os.makedirs(folder, exist_ok=True)
                _write(f"{folder}/{FILES[controller][0 if version == 2 else 1]}", str(limits[controller]))
            except OSError:
                _remove(folder)
                continue
            folders[controller] = folder
        return cls(folders)

    @property
    def controllers(self) -> list[str]:
        return sorted(self._folders)

    def add(self, pid: int) -> None:
        for folder in set(self._folders.values()):
            _write(f"{folder}/cgroup.procs", str(pid))

    def num_oom_kills(self) -> int:
        """Return how many of its processes the kernel's OOM killer has killed."""
        folder = self._folders.get("memory", "")
        for name in ("memory.events", "memory.oom_control"):
            for line in read(f"{folder}/{name}").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0

    def remove(self) -> None:
        """Remove the groups. All their processes must have ended."""
        for folder in set(self._folders.values()):
            _remove(folder)


def _parents() -> dict[str, tuple[str, int]]:
    """Return {controller: (folder of this process's own group, version of its hierarchy)}, if writable."""
    found: dict[str, tuple[str, int]] = {}
    for line in read("/proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        for controller in FILES:
            if controller in names.split(","):
                found[controller] = (f"/sys/fs/cgroup/{controller}{path.rstrip('/')}", 1)
            elif not names and controller not in found:
                parent = f"/sys/fs/cgroup{path.rstrip('/')}"
                if controller in read(f"{parent}/cgroup.subtree_control").split():
                    found[controller] = (parent, 2)
    return {
        controller: (parent, version)
        for controller, (parent, version) in found.items()
        if os.access(parent, os.W_OK)
    }


def _sweep(parent: str) -> None:
    """Remove groups that killed launchers and owners of boxes left behind."""
    for name in os.listdir(parent):
        for prefix in (PREFIX, BOX_PREFIX):
            pid = name.removeprefix(prefix).partition("-")[0]
            if name.startswith(prefix) and not os.path.exists(f"/proc/{pid}"):
                _remove(f"{parent}/{name}")


def _remove(folder: str) -> None:
    try:
        os.rmdir(folder)
    except OSError:
        return  # a later launcher will remove it


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
