"""Leases of boxes that live outside of their process: who owns one, and does the owner still live?

A lease is a text, the value of a label of each container. It names the process that started it, so that a box
whose owner was killed can be told from one that is in use.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

LABEL = "agentrl.lease"
Ownership = Literal["in use", "nobody's", "another machine's", "unreadable"]


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


@dataclass(frozen=True, slots=True)
class FoundBox:
    """A box that a run started, by its name for whatever keeps it. lease: the text of its label."""

    name: str
    lease: str

    @property
    def ownership(self) -> Ownership:
        try:
            lease = BoxLease.parse(self.lease)
        except ValueError:
            return "unreadable"
        if not lease.is_here:
            return "another machine's"
        return "in use" if lease.is_alive else "nobody's"


class Keeper(Protocol):
    """What keeps boxes that may outlive their process: an engine of containers, or a cloud. Methods block."""

    def found(self) -> list[FoundBox]:
        """Return the boxes that runs started, running or not. Raises SandboxError."""

    def end(self, name: str) -> None:
        """End a box, which may be gone. Raises SandboxError."""


def sweep(keeper: Keeper) -> list[FoundBox]:
    """End the boxes that nobody owns, and return them.

    Raises:
        SandboxError: the keeper does not answer, or a box cannot be ended.
    """
    lost = [box for box in keeper.found() if box.ownership == "nobody's"]
    for box in lost:
        keeper.end(box.name)
    return lost


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
