"""Which boxes live outside of the processes of a run: in the engines of this machine, or in a cloud."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from agentrl.errors import SandboxError
from agentrl.extras.boxes.container import ask, end, last_line
from agentrl.extras.boxes.leases import LABEL, FoundBox

ENGINES = ("podman", "docker")


class Containers:
    """The containers of an engine. command: the engine's, with options for all of its calls."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command

    def found(self) -> list[FoundBox]:
        listed = ask(self._command, "ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={LABEL}")
        if listed.returncode != 0:
            raise SandboxError(f"`{self._command[0]} ps` failed: {last_line(listed.stderr)}")
        if not (ids := listed.stdout.split()):
            return []
        form = '{{.Name}} {{index .Config.Labels "' + LABEL + '"}}'
        # Some may be gone meanwhile.
        told = ask(self._command, "container", "inspect", "--format", form, *ids)
        lines = (line.partition(" ") for line in told.stdout.splitlines())
        return [FoundBox(name.removeprefix("/"), lease) for name, _, lease in lines if name]

    def end(self, name: str) -> None:
        end(self._command, name)


def installed_engines() -> list[Containers]:
    return [Containers((name,)) for name in ENGINES if shutil.which(name) is not None]
