"""Boxes of Modal: a sandbox of Modal each, by Modal's own client (agentrl/extras/boxes/README.md)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

import trio

from agentrl.errors import ConfigError, SandboxError
from agentrl.extras.boxes.box import BoxMaker, OpenBox, Start
from agentrl.extras.boxes.leases import BoxLease, FoundBox, own_lease
from agentrl.extras.boxes.machine_box import MachineBox, MachineGone, call
from agentrl.extras.boxes.modal_cloud import (
    BROKEN,
    BUSY,
    TOKEN_ENV,
    ModalCloud,
    NoFile,
    NotThere,
    TooLong,
    asked,
    client_module,
    patiently,
)
from agentrl.extras.boxes.served_box import filled

log = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_FOLDER = "work"
MARK = {"agentrl": "box"}
"""Tag of all sandboxes that runs started."""
IMAGE_S = 1200.0
"""Modal fetches an image of a registry when a workspace first asks for it."""
START_S = 120.0
REQUEST_S = 30.0
"""Seconds for a request that runs no command."""
LATE_S = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Before each look at a sandbox that a worker does not know, and that Modal still takes for running."""
STILL_RUNS = -1
"""The client's exit code of a command that has not ended at its deadline."""
BEATS = 3
"""Signs of life in the time after which a sandbox counts as idle."""


class ModalBoxes(BoxMaker):
    """Starts sandboxes, without a network unless `has_internet`. A row's image is of a registry, or an id.

    app: the app that sandboxes belong to. image: of rows that name none; None: Modal's own. folder: working
    folder, in that of the image. lifetime_s: Modal ends a sandbox that is older. idle_s: Modal ends a sandbox
    that gets no sign of life from this process for so long. cpus, memory_mib: of a sandbox, reserved and at
    most; None: Modal's default. region: where Modal may place sandboxes; None: anywhere.
    """

    def __init__(
        self,
        *,
        app: str,
        lifetime_s: float,
        idle_s: float,
        memory_mib: int | None = None,
        cpus: float | None = None,
        image: str | None = None,
        folder: str | None = None,
        region: str | None = None,
        has_internet: bool = False,
    ) -> None:
        self._cloud = ModalCloud(app)
        self._lifetime_s = math.ceil(lifetime_s)
        self._idle_s = math.ceil(idle_s)
        self._memory = None if memory_mib is None else (memory_mib, memory_mib)
        self._cpu = None if cpus is None else (cpus, cpus)
        self._image = image
        self._folder = folder or DEFAULT_FOLDER
        self._region = region
        self._has_internet = has_internet
        self._heartbeats = _Heartbeats(idle_s / BEATS)

    def check(self) -> None:
        client_module()
        if missing := [name for name in TOKEN_ENV if not os.environ.get(name)]:
            raise ConfigError(
                f"kind: modal: there is no token: {' and '.join(missing)} must be set in the environment"
            )

    async def start(self, start: Start) -> OpenBox:
        name = start.image or self._image
        image = await call(lambda: asked(lambda: self._cloud.image(name), within_s=IMAGE_S))
        # Not abandoned: a sandbox that is made while this is cancelled must be ended.
        machine = await trio.to_thread.run_sync(lambda: self._machine(image))
        return await filled(MachineBox(machine, folder=self._folder), start)

    def found(self) -> list[FoundBox]:
        tags = asked(lambda: self._cloud.tags(MARK), within_s=START_S)
        return [FoundBox(name, _lease(of_box)) for name, of_box in tags.items()]

    def end(self, name: str) -> None:
        with contextlib.suppress(NotThere):
            asked(lambda: self._cloud.end(name), within_s=START_S)

    def _machine(self, image: Any) -> _ModalMachine:
        ends_at = time.monotonic() + self._lifetime_s
        made = asked(lambda: self._made(image), within_s=START_S)
        return _ModalMachine(made, ends_at=ends_at, heartbeats=self._heartbeats)

    async def _made(self, image: Any) -> Any:
        """Create a sandbox, under a name of its own: what an error has left half made can be removed."""
        name = f"agentrl-{uuid.uuid4().hex}"
        modal = client_module()
        try:
            return await modal.Sandbox.create.aio(
                *("sleep", str(2 * self._lifetime_s)),
                app=await self._cloud.app(),
                client=await self._cloud.client(),
                image=image,
                name=name,
                tags=_tags(own_lease()),
                timeout=self._lifetime_s,
                idle_timeout=self._idle_s,
                block_network=not self._has_internet,
                region=self._region,
                cpu=self._cpu,
                memory=self._memory,
            )
        except modal.exception.ResourceExhaustedError:  # nothing was made
            raise
        except BaseException:  # also a deadline, which cancels
            await self._cloud.remove(name)
            raise


class _ModalMachine:
    """A machine, by the client's object for it. ends_at: when Modal ends it, by the monotonic clock."""

    def __init__(self, sandbox: Any, *, ends_at: float, heartbeats: _Heartbeats) -> None:
        self._sandbox = sandbox
        self._ends_at = ends_at
        self._heartbeats = heartbeats
        self._is_ended = False
        heartbeats.add(sandbox)

    def run(self, command: str, *, timeout_s: float) -> str | None:
        seconds = math.ceil(timeout_s)
        line = f"{command} 2>/dev/null"
        try:
            code, told = self._played(
                lambda: self._output(line, seconds), within_s=seconds + REQUEST_S, again=()
            )
        except TooLong:  # what runs there keeps the servant from answering
            return None
        return told.decode("utf-8", "replace") if code == 0 else None

    def write(self, path: str, content: bytes) -> None:
        files = self._sandbox.filesystem
        self._played(lambda: files.write_bytes.aio(content, path), within_s=REQUEST_S)

    def read(self, path: str) -> bytes | None:
        files = self._sandbox.filesystem
        try:
            return bytes(self._played(lambda: files.read_bytes.aio(path), within_s=REQUEST_S))
        except NoFile:
            return None

    def end(self) -> None:
        self._is_ended = True
        self._heartbeats.discard(self._sandbox)
        with contextlib.suppress(NotThere):
            asked(self._terminated, within_s=START_S)

    async def _terminated(self) -> None:
        """End the sandbox and the connection to its worker."""
        try:
            await self._sandbox.terminate.aio()
        except client_module().exception.ClientClosed:  # both have ended before
            return
        await self._sandbox.detach.aio()

    async def _output(self, line: str, seconds: int) -> tuple[int, bytes]:
        """Run a line of a shell; return its exit code and its standard output."""
        process = await patiently(
            lambda: self._sandbox.exec.aio("sh", "-c", line, timeout=seconds, text=False), again=BUSY
        )
        told, code = await asyncio.gather(process.stdout.read.aio(), process.wait.aio())
        if code == STILL_RUNS:
            raise TooLong("Modal: the command did not end in time")
        return code, told

    def _played(
        self, method: Callable[[], Awaitable[T]], *, within_s: float, again: tuple[str, ...] = BROKEN
    ) -> T:
        """Ask the sandbox. If this fails, what became of the sandbox decides whose fault it is.

        Raises:
            MachineGone: its lifetime is over, or its first process has ended, as after a command that killed
                it. SandboxError: Modal lost it, or broke.
        """
        try:
            return asked(method, within_s=within_s, again=again)
        except SandboxError as failure:
            if self._is_ended:  # by this process, while a cancelled request was going on
                raise
            waits_s = LATE_S if isinstance(failure, NotThere) else LATE_S[:1]
            try:
                end = asked(functools.partial(self._end, waits_s), within_s=START_S)
            except NotThere:
                end = _End("Modal does not know it", is_lost=True)
            if end is None:
                raise
            if end.is_lost and time.monotonic() < self._ends_at:
                raise SandboxError(f"Modal: the sandbox is lost: {end.reason}") from failure
            raise MachineGone(end.reason) from failure

    async def _end(self, waits_s: Iterable[float]) -> _End | None:
        """Return how the sandbox ended; None if it runs. waits_s: before each look for an end.

        The client tells a timeout, a termination and an exit code. A sandbox that Modal ended by itself has
        none: it was idle, its worker was lost, or never had room for it.
        """
        code = None
        for wait_s in waits_s:
            await asyncio.sleep(wait_s)
            if (code := await self._sandbox.poll.aio()) is not None:
                break
        if code is None:
            return None
        exception = client_module().exception
        try:
            await self._sandbox.wait.aio()
        except exception.SandboxTimeoutError:
            return _End("its lifetime is over", is_lost=False)
        except exception.SandboxTerminatedError:
            return _End("it was terminated from outside", is_lost=True)
        if code == 0:
            return _End("Modal ended it before its time", is_lost=True)
        return _End(f"its first process ended with exit code {code}", is_lost=False)


@dataclass(frozen=True, slots=True)
class _End:
    """How a sandbox ended. is_lost: nothing that ran in it can have done that."""

    reason: str
    is_lost: bool


class _Heartbeats:
    """Keeps sandboxes from being idle as long as this process lives. One thread does it for all of them."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._sandboxes: set[Any] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, sandbox: Any) -> None:
        with self._lock:
            self._sandboxes.add(sandbox)
            if self._thread is None:
                self._thread = threading.Thread(target=self._beat, name="heartbeats of boxes", daemon=True)
                self._thread.start()

    def discard(self, sandbox: Any) -> None:
        with self._lock:
            self._sandboxes.discard(sandbox)

    def _beat(self) -> None:
        while True:
            time.sleep(self._every_s)
            with self._lock:
                living = tuple(self._sandboxes)
            if not living:
                continue
            try:
                asked(functools.partial(_signed, living), within_s=REQUEST_S, again=())
            except SandboxError as error:
                log.info("not all boxes got a sign of life: %s", error)


async def _signed(sandboxes: Iterable[Any]) -> None:
    """Run a command in each sandbox that does nothing. A sandbox that fails tells so at its next request."""
    signs = (one.exec.aio("true", timeout=math.ceil(REQUEST_S)) for one in sandboxes)
    await asyncio.gather(*signs, return_exceptions=True)


def _tags(lease: BoxLease) -> dict[str, str]:
    """Return the tags of a sandbox. They are short and have no slash: each part of the lease is one."""
    return MARK | {f"agentrl.{name}": str(value) for name, value in asdict(lease).items()}


def _lease(tags: Mapping[str, str]) -> str:
    """Return the text of the lease in tags."""
    return "/".join(tags.get(f"agentrl.{part.name}", "") for part in fields(BoxLease))
