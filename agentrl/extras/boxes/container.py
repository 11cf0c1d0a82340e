"""Boxes of containers, by the command line of podman or docker."""

from __future__ import annotations

import json
import resource
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from functools import partial
from typing import Literal

import trio

from agentrl.errors import ConfigError, DataError, SandboxError
from agentrl.extras.boxes.box import BoxMaker, OpenBox, Start
from agentrl.extras.boxes.bubblewrap import WORK, limits_of
from agentrl.extras.boxes.command_place import CommandPlace
from agentrl.extras.boxes.leases import LABEL, own_lease
from agentrl.extras.boxes.served_box import SERVANT, ServedBox, filled
from agentrl.extras.sandbox import Limits

Engine = Literal["podman", "docker"]
MIB = 2**20
ASK_S = 30.0
"""Deadline of a command of the engine that starts nothing."""
MAX_USER_PROCESSES = 16_384
OPTIONS = (
    *("run", "--rm", "--interactive", "--pull", "never", "--network", "none", "--stop-timeout", "0"),
    *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
)


class ContainerBoxes(BoxMaker):
    """Starts a container per box. Its first process is the servant, which needs the image's python3.

    command: the engine's command, with options for all of its calls. image: for rows that name none.
    folder: the working folder, as the image has it; None: an empty one. scratch: further writable folders.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        command: Sequence[str],
        image: str | None = None,
        folder: str | None = None,
        scratch: Sequence[str] = (),
    ) -> None:
        self._limits = limits
        self.command = tuple(command)
        self._image = image
        self._folder = folder
        self._scratch = scratch
        self._known: set[str] = set()

    def check(self) -> None:
        name = self.command[0]
        if shutil.which(name) is None:
            raise ConfigError(f"kind: {name}: the command {name} is not installed")
        done = ask(self.command, "info")
        if done.returncode != 0:
            raise ConfigError(f"kind: {name}: `{name} info` failed: {last_line(done.stderr)}")
        if self._image is not None:
            self._find(self._image)

    async def start(self, start: Start) -> OpenBox:
        image = start.image or self._image
        if image is None:
            raise DataError(
                f"boxes of kind {self.command[0]!r} need an image: name one in the row's environment_kwargs, "
                "or in agent.environment_config"
            )
        if image not in self._known:
            await trio.to_thread.run_sync(self._find, image)
        place = await trio.to_thread.run_sync(self._place, image)
        return await filled(ServedBox(place, requests=place.requests, answers=place.answers), start)

    def _find(self, image: str) -> None:
        """Raise DataError if the engine has no such image. None is fetched: a run waits for no registry."""
        name = self.command[0]
        done = ask(self.command, "image", "inspect", "--format", "{{.Id}}", image)
        if done.returncode != 0:
            raise DataError(f"image {image!r}: {name} does not have it here; try `{name} pull {image}`")
        self._known.add(image)

    def _place(self, image: str) -> CommandPlace:
        name = f"agentrl-{secrets.token_hex(8)}"
        settings = {
            "folder": self._folder or WORK,
            "origin": None,
            "user": None,
            "lifetime_s": self._limits.wall_s,
            # The engine counts processes and memory of the container.
            "limits": {
                key: value
                for key, value in limits_of(self._limits).items()
                if key not in ("RLIMIT_AS", "RLIMIT_NPROC")
            },
        }
        return CommandPlace(
            [
                *self.command,
                *OPTIONS,
                *("--name", name, "--label", f"{LABEL}={own_lease()}"),
                *self._resources(),
                *("--entrypoint", "python3", image, "-c", SERVANT, "pipes", json.dumps(settings)),
            ],
            kill=lambda _: end(self.command, name),
            after=partial(end, self.command, name),
        )

    def _resources(self) -> list[str]:
        limits = self._limits
        tmpfs = f"rw,exec,nosuid,nodev,size={limits.disk_mib}m,mode=1777"
        memory = f"{limits.memory_mib}m"
        writable = ["/tmp", *self._scratch, *([WORK] if self._folder is None else [])]
        return [
            *("--ulimit", f"nofile={limits.max_open_files}:{limits.max_open_files}"),
            *limit_of_processes(),
            *("--memory", memory, "--memory-swap", memory, "--pids-limit", str(limits.max_processes + 2)),
            *(option for path in writable for option in ("--tmpfs", f"{path}:{tmpfs}")),
            *("--env", "PYTHONDONTWRITEBYTECODE=1"),
        ]


def limit_of_processes() -> tuple[str, ...]:
    """Return the option that keeps the engine from raising the limit of a user's processes, which needs a
    privilege that it may lack. `--pids-limit` is the limit of the box.
    """
    most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    number = MAX_USER_PROCESSES if most == resource.RLIM_INFINITY else min(MAX_USER_PROCESSES, most)
    return "--ulimit", f"nproc={number}:{number}"


def ask(command: Sequence[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of an engine that starts nothing.

    Raises:
        SandboxError: it does not answer.
    """
    try:
        return subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            timeout=ASK_S,
            stdin=subprocess.DEVNULL,
            check=False,
            cwd="/",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"`{' '.join([command[0], *arguments[:2]])}`: {error}") from error


def end(command: Sequence[str], name: str) -> None:
    """Kill a container and remove it. It may be gone.

    Raises:
        SandboxError: it is still there.
    """
    done = ask(command, "rm", "--force", name)
    if done.returncode == 0 or "no such container" in done.stderr.lower():
        return
    if ask(command, "container", "inspect", "--format", "{{.Id}}", name).returncode == 0:
        raise SandboxError(
            f"container {name} cannot be removed: {last_line(done.stderr)}; `agentrl boxes` lists it"
        )


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else "no message"
