"""Boxes of bubblewrap: a servant in namespaces of its own, above files of an image or of the node."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import struct
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import trio

from agentrl.errors import ConfigError, DataError, SandboxError
from agentrl.extras.boxes.box import BoxMaker, Executed, OpenBox, Start
from agentrl.extras.boxes.command_place import CommandPlace, kill_children
from agentrl.extras.boxes.served_box import SERVANT, ServedBox, filled
from agentrl.extras.sandbox import Limits, SandboxResult, Wall
from agentrl.extras.sandbox.launcher import kernel, seccomp
from agentrl.extras.sandbox.launcher.cgroup import ControlGroup
from agentrl.extras.sandbox.launcher.identity import INNER_ID, stranger
from agentrl.extras.sandbox.launcher.jail import (
    COMMAND_DATA,
    SYSTEM_COMMANDS,
    SYSTEM_LIBRARIES,
    SYSTEM_PREFIXES,
)
from agentrl.extras.sandbox.protections import PROBE, bait, judge

MIB = 2**20
WORK = "/work"
"""Working folder of boxes without an image, and of images that name none."""
PYTHON = "/python"
ORIGIN = "/.origin"
"""Where the image's own working folder lies, for the servant to copy."""
OWN_MOUNTS = frozenset({"dev", "proc", "sys", "tmp", "run"})
NODE_FOLDERS = (*SYSTEM_LIBRARIES, *COMMAND_DATA, "/packages/0")
PROBE_S, CHECK_S = 60.0, 150.0
_numbers = itertools.count()
"""Of the boxes of this process, whatever their options."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class BubblewrapBoxes(BoxMaker):
    """Starts boxes within `limits`. Images are folders with a root file system.

    image: for rows that name none; None: commands and libraries of the node. folder: the working folder;
    None: an empty one. scratch: further writable folders. allow_unprotected: walls that may be missing.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        image: str | None = None,
        folder: str | None = None,
        scratch: Sequence[str] = (),
        allow_unprotected: Sequence[Wall] = (),
    ) -> None:
        self._limits = limits
        self._image = image
        self._folder = folder or WORK
        self._scratch = scratch
        self._allowed = allow_unprotected

    def check(self) -> None:
        if shutil.which("bwrap") is None:
            raise ConfigError("kind: bubblewrap: the command bwrap is not installed (apt install bubblewrap)")
        with bait(self._limits) as baited, ThreadPoolExecutor(1) as thread:  # trio may run in this thread
            probed = thread.submit(trio.run, self._probe, json.dumps(baited).encode())
            done, layers = probed.result(CHECK_S)
            result = SandboxResult(
                done.stdout, done.stderr, done.exit_code, None, "exited", False, done.wall_s, 0.0
            )
            found = judge(result, {"layers": layers, "peak_bytes": 0}, baited, self._limits)
        missing = {wall: why for wall, why in found.missing.items() if wall not in self._allowed}
        if missing:
            raise ConfigError(
                "kind: bubblewrap: this machine is not protected from the model's programs: "
                f"{'; '.join(f'{wall} ({why})' for wall, why in missing.items())}. Accept the risk with "
                f"allow_unprotected: [{', '.join(missing)}], or use kind: process"
            )

    async def start(self, start: Start) -> OpenBox:
        box, _ = await self._open(start.image or self._image)
        return await filled(box, start)

    async def _probe(self, baited: bytes) -> tuple[Executed, list[str]]:
        box, layers = await self._open(None)
        try:
            done = await box.run(
                ["python3", "-c", PROBE], stdin=baited, timeout_s=PROBE_S, max_output_bytes=MIB
            )
            return done, layers
        finally:
            await box.stop()

    async def _open(self, image: str | None) -> tuple[ServedBox, list[str]]:
        """Start a box; return it with the mechanisms in use.

        Raises:
            DataError: there is no such image. SandboxError: bubblewrap does not start it.
        """
        if image is not None and not os.path.isdir(image):
            raise DataError(
                f"image {image!r}: no such folder; for boxes of kind 'bubblewrap' an image is a folder "
                "with an unpacked root file system"
            )
        place, layers = await trio.to_thread.run_sync(self._place, image)
        return ServedBox(place, requests=place.requests, answers=place.answers), layers

    def _place(self, image: str | None) -> tuple[CommandPlace, list[str]]:
        limits = self._limits
        groups = ControlGroup.make(
            memory_bytes=limits.memory_mib * MIB,
            max_processes=limits.max_processes + 4,  # bwrap and the servant
            box=next(_numbers),
        )
        filtered = system_call_filter()
        try:
            place = CommandPlace(
                self._command(image, filtered),
                pass_fds=() if filtered is None else (filtered,),
                before=groups.add,
                kill=kill_children,
                after=groups.remove,
            )
        except BaseException:
            groups.remove()
            raise
        finally:
            if filtered is not None:
                os.close(filtered)
        return place, ["namespaces", *(f"cgroup {name}" for name in groups.controllers)]

    def _command(self, image: str | None, filtered: int | None) -> list[str]:
        is_root = os.geteuid() == 0
        user = stranger() if is_root else None
        if is_root and user is None:
            raise SandboxError("bubblewrap as root: there is no other user id in this namespace")
        origin = None if image is None else f"{image}{self._folder}"
        has_origin = origin is not None and os.path.isdir(origin)
        settings = {
            "folder": self._folder,
            "origin": ORIGIN if has_origin else None,
            "user": user,
            "lifetime_s": self._limits.wall_s,
            "limits": limits_of(self._limits),
        }
        return [
            "bwrap",
            *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
            *("--cap-drop", "ALL"),
            # The servant drops root for a user that owns nothing here.
            *(root_capabilities() if is_root else inner_user()),
            *("--as-pid-1", "--hostname", "box", "--clearenv"),
            *environment(self._folder, image),
            *folders_above(self._folder, *self._scratch, *(NODE_FOLDERS if image is None else ())),
            *(node_mounts() if image is None else image_mounts(image, (*self._scratch, self._folder))),
            *(("--ro-bind", str(origin), ORIGIN) if has_origin else ()),
            *("--dev", "/dev", "--proc", "/proc"),
            *self._writable("/dev/shm", "/tmp", *self._scratch, self._folder),
            *("--remount-ro", "/"),
            *(() if filtered is None else ("--seccomp", str(filtered))),
            *("python3", "-c", SERVANT, "pipes", json.dumps(settings)),
        ]

    def _writable(self, *paths: str) -> Iterator[str]:
        for path in paths:
            yield from ("--perms", "1777", "--size", str(self._limits.disk_mib * MIB), "--tmpfs", path)


def limits_of(limits: Limits) -> dict[str, int]:
    """Return the limits of each process, by their names in `resource`."""
    return {
        "RLIMIT_AS": limits.memory_mib * MIB,
        "RLIMIT_CPU": max(1, int(limits.cpu_s)),
        "RLIMIT_FSIZE": limits.file_mib * MIB,
        "RLIMIT_NOFILE": limits.max_open_files,
        "RLIMIT_NPROC": limits.max_processes + 2,
        "RLIMIT_CORE": 0,
    }


def root_capabilities() -> Iterator[str]:
    """Return what the servant needs to become another user who owns the working folder."""
    for name in ("CAP_SETUID", "CAP_SETGID", "CAP_CHOWN"):
        yield from ("--cap-add", name)


def inner_user() -> tuple[str, ...]:
    return "--unshare-user", "--uid", str(INNER_ID), "--gid", str(INNER_ID)


def environment(folder: str, image: str | None) -> Iterator[str]:
    values = {"HOME": folder, "TMPDIR": "/tmp", "PATH": PATH, "LANG": "C.UTF-8", "TZ": "UTC"}
    values["PYTHONDONTWRITEBYTECODE"] = "1"
    if image is None:
        values["PYTHONPATH"] = ":".join(f"/packages/{index}" for index in range(len(package_folders())))
        if node_prefix() is not None:
            values |= {"PATH": f"{PYTHON}/bin:{PATH}", "LD_LIBRARY_PATH": f"{PYTHON}/lib"}
    for name, value in values.items():
        yield from ("--setenv", name, value)


def node_prefix() -> str | None:
    """Return the folder of the node's interpreter; None if it is one of the system's."""
    prefix = os.path.realpath(sys.base_prefix)
    return None if prefix in SYSTEM_PREFIXES else prefix


def package_folders() -> list[str]:
    paths = dict.fromkeys(os.path.realpath(sysconfig.get_path(kind)) for kind in ("purelib", "platlib"))
    return [path for path in paths if os.path.isdir(path)]


def node_mounts() -> Iterator[str]:
    """Show what commands of the node need: no home folders, no configuration, no secrets."""
    for path in (*SYSTEM_LIBRARIES, *SYSTEM_COMMANDS, *COMMAND_DATA, "/etc/ld.so.cache"):
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        elif os.path.exists(path):
            yield from ("--ro-bind", path, path)
    if (prefix := node_prefix()) is not None:
        yield from ("--ro-bind", prefix, PYTHON)
    for index, path in enumerate(package_folders()):
        yield from ("--ro-bind", path, f"/packages/{index}")


def folders_above(*paths: str) -> Iterator[str]:
    """Make the folders above some paths: those that bwrap makes by itself are closed to others than root."""
    for folder in dict.fromkeys(
        str(above) for path in paths for above in reversed(PurePosixPath(path).parents)
    ):
        if folder != "/":
            yield from ("--perms", "0755", "--dir", folder)


def image_mounts(image: str, writable: Sequence[str]) -> Iterator[str]:
    """Show an image's files read-only, except for the writable folders and what each box has of its own.

    A writable folder below another one hides what the image has beside it.
    """
    hidden = {*OWN_MOUNTS, *(PurePosixPath(path).parts[1] for path in writable)}
    for path in sorted(Path(image).iterdir()):
        if path.name in hidden:
            continue
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), f"/{path.name}")
        else:
            yield from ("--ro-bind", str(path), f"/{path.name}")


def system_call_filter() -> int | None:
    """Return a file with the sandbox's filter of system calls; None on a processor that it does not know."""
    arch = kernel.machine()
    if arch not in seccomp.AUDIT_ARCH:
        return None
    program = seccomp.filter_program(arch, keeps_metadata=False)
    descriptor = os.memfd_create("filter")
    os.write(descriptor, b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
