"""Leases of boxes that live outside of their process: who owns one, and does the owner still live?

A lease is a text, the value of a label of each container. It names the process that started it, so that a box
whose owner was killed can be told from one that is in use.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

LABEL = "agentrl.lease"


@dataclass(frozen=True, slots=True)
class BoxLease:
    """The owner of a box.

    host: its machine. boot: the kernel's id of its start. pid, started: the process, and when it began, in
    clock ticks since the boot: the number of an ended process is given to another one some time.
    """

    host: str
    boot: str
    pid: int
    started: int

    def __str__(self) -> str:
        return f"{self.host}/{self.boot}/{self.pid}/{self.started}"

    @classmethod
    def parse(cls, text: str) -> BoxLease:
        """Raise ValueError if it is no lease."""
        host, boot, pid, started = text.rsplit("/", 3)
        return cls(host, boot, int(pid), int(started))

    @property
    def is_here(self) -> bool:
        """Whether the owner's machine is this one: only then is known whether it lives."""
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Whether the owner lives. For a lease of this machine."""
        return self.boot == boot_id() and started_at(self.pid) == self.started


def own_lease() -> BoxLease:
    """Return the lease of boxes that this process starts."""
    started = started_at(os.getpid())
    assert started is not None
    return BoxLease(socket.gethostname(), boot_id(), os.getpid(), started)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def started_at(pid: int) -> int | None:
    """Return when a process began, in clock ticks since the boot; None if there is none with this number."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may have spaces
    return None if fields[0] == "Z" else int(fields[19])
