"""Which boxes live outside of the processes of a run, and which of them nobody owns any more."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agentrl.boxes.container import ask, end, last_line
from agentrl.boxes.leases import LABEL, BoxLease
from agentrl.errors import SandboxError

ENGINES = ("podman", "docker")
Ownership = Literal["in use", "nobody's", "another machine's", "unreadable"]


@dataclass(frozen=True, slots=True)
class FoundBox:
    """A container that a run started. lease: the text of its label."""

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


def found_boxes(command: Sequence[str]) -> list[FoundBox]:
    """Return the boxes that an engine has, running or not.

    Raises:
        SandboxError: the engine does not answer.
    """
    listed = ask(command, "ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={LABEL}")
    if listed.returncode != 0:
        raise SandboxError(f"`{command[0]} ps` failed: {last_line(listed.stderr)}")
    if not (ids := listed.stdout.split()):
        return []
    form = '{{.Name}} {{index .Config.Labels "' + LABEL + '"}}'
    told = ask(command, "container", "inspect", "--format", form, *ids)  # some may be gone meanwhile
    lines = (line.partition(" ") for line in told.stdout.splitlines())
    return [FoundBox(name.removeprefix("/"), lease) for name, _, lease in lines if name]


def sweep(command: Sequence[str]) -> list[FoundBox]:
    """Remove the boxes that nobody owns, and return them.

    Raises:
        SandboxError: the engine does not answer, or a box cannot be removed.
    """
    lost = [box for box in found_boxes(command) if box.ownership == "nobody's"]
    for box in lost:
        end(command, box.name)
    return lost


def installed_engines() -> list[tuple[str, ...]]:
    return [(name,) for name in ENGINES if shutil.which(name) is not None]
