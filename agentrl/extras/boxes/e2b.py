"""Boxes of E2B: a micro virtual machine each, by E2B's own client (agentrl/extras/boxes/README.md)."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import httpx
import trio

from agentrl.errors import ConfigError, DataError, SandboxError
from agentrl.extras.boxes.box import BoxMaker, OpenBox, Start
from agentrl.extras.boxes.leases import LABEL, FoundBox, own_lease
from agentrl.extras.boxes.machine_box import MachineBox, MachineGone
from agentrl.extras.boxes.served_box import filled

T = TypeVar("T")

DEFAULT_FOLDER = "work"
NOT_FOUND = 404
LATE_S = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Before each look at a machine that is not reached, and that E2B still takes for running."""


class E2bBoxes(BoxMaker):
    """Starts machines without access to the internet. The template of a row is its image.

    image: template of rows that name none; None: E2B's own. folder: working folder, in the home folder.
    lifetime_s: E2B ends a machine that is older. api_key: None: that of the client, E2B_API_KEY.
    """

    def __init__(
        self,
        *,
        lifetime_s: float,
        image: str | None = None,
        folder: str | None = None,
        api_key: str | None = None,
    ) -> None:
        self._lifetime_s = math.ceil(lifetime_s)
        self._image = image
        self._folder = folder or DEFAULT_FOLDER
        self._key = api_key

    def check(self) -> None:
        _client()
        if not (self._key or os.environ.get("E2B_API_KEY")):
            raise ConfigError(
                "kind: e2b: there is no key: set the environment variable E2B_API_KEY, or name another one "
                "in api_key_env"
            )

    async def start(self, start: Start) -> OpenBox:
        image = start.image or self._image
        # Not abandoned: a machine that is made while this is cancelled must be ended.
        machine = await trio.to_thread.run_sync(lambda: self._machine(image))
        return await filled(MachineBox(machine, folder=self._folder), start)

    def found(self) -> list[FoundBox]:
        pages, boxes = _client().Sandbox.list(api_key=self._key), []
        while pages.has_next:
            for info in _asked(pages.next_items):
                if (lease := info.metadata.get(LABEL)) is not None:
                    boxes.append(FoundBox(info.sandbox_id, lease))
        return boxes

    def end(self, name: str) -> None:
        _asked(lambda: _client().Sandbox.kill(name, api_key=self._key))

    def _machine(self, image: str | None) -> _E2bMachine:
        create = _client().Sandbox.create
        ends_at = time.monotonic() + self._lifetime_s
        try:
            made = _asked(
                lambda: create(
                    image,
                    timeout=self._lifetime_s,
                    metadata={LABEL: str(own_lease())},
                    allow_internet_access=False,
                    api_key=self._key,
                )
            )
        except MachineGone as error:
            raise DataError(f"image {image!r}: E2B has no such template: {error}") from error
        return _E2bMachine(made, ends_at=ends_at)


class _E2bMachine:
    """A machine, by the client's object for it. ends_at: when E2B ends it, by the monotonic clock."""

    def __init__(self, sandbox: Any, *, ends_at: float) -> None:
        self._sandbox = sandbox
        self._ends_at = ends_at

    def run(self, command: str, *, timeout_s: float) -> str | None:
        client = _client()
        try:
            return str(self._played(lambda: self._sandbox.commands.run(command, timeout=timeout_s)).stdout)
        except (client.CommandExitException, _TooLong):
            return None  # if it is late, what runs there keeps the servant from answering

    def write(self, path: str, content: bytes) -> None:
        self._played(lambda: self._sandbox.files.write(path, content, use_octet_stream=True))

    def read(self, path: str) -> bytes | None:
        try:
            return bytes(self._played(lambda: self._sandbox.files.read(path, format="bytes")))
        except _client().FileNotFoundException:
            return None

    def end(self) -> None:
        _asked(self._sandbox.kill)

    def _played(self, method: Callable[[], T]) -> T:
        """Ask the machine. If this fails, what became of the machine decides whose fault it is.

        Raises:
            MachineGone: its lifetime is over, or E2B does not know it any more, as after a command that shut
                it down. SandboxError: E2B paused it, or broke. As `_asked` if the machine runs.
        """
        try:
            return _asked(method)
        except (MachineGone, SandboxError) as failure:
            is_gone = isinstance(failure, MachineGone)
            try:
                state = self._state(LATE_S if is_gone else LATE_S[:1])
            except MachineGone as gone:
                is_old = time.monotonic() >= self._ends_at
                raise MachineGone("its lifetime is over" if is_old else str(gone)) from failure
            if state != "running":
                raise SandboxError(f"E2B: the machine is {state} before its time") from failure
            if is_gone:
                raise SandboxError(f"E2B: the machine runs, but is not reached: {failure}") from failure
            raise

    def _state(self, waits_s: Iterable[float]) -> str:
        """Return what E2B takes the machine for. waits_s: before each look, as long as it is running.

        Raises:
            MachineGone: E2B does not know it. SandboxError: E2B does not tell.
        """
        state = ""
        for wait_s in waits_s:
            time.sleep(wait_s)
            try:
                state = str(_asked(self._sandbox.get_info).state)
            except _TooLong as error:  # that of a question is not that of a command
                raise SandboxError(str(error)) from error
            if state != "running":
                break
        return state


class _TooLong(SandboxError):
    """A request, or the command in it, did not end in time."""


def _client() -> Any:
    """Return the client's module.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import e2b
    except ImportError as error:
        raise ConfigError("kind: e2b needs E2B's client: pip install 'agentrl[e2b]'") from error
    return e2b


def _asked(method: Callable[[], T]) -> T:
    """Call a method of the client, which retries by itself what E2B asks to retry.

    Raises:
        MachineGone: E2B does not know the machine, or the template. SandboxError: E2B broke; its subclass
            says that it took too long. CommandExitException, FileNotFoundException: of the client, for a
            command that failed and a file that is not there.
    """
    from e2b import exceptions

    client = _client()
    try:
        return method()
    except (client.CommandExitException, exceptions.FileNotFoundException):
        raise
    except (exceptions.NotFoundException, exceptions.SandboxNotRunningException) as error:
        raise MachineGone(_line(error)) from error
    except Exception as error:
        if getattr(error, "status_code", None) == NOT_FOUND:
            raise MachineGone(_line(error)) from error
        is_broken = isinstance(error, (exceptions.SandboxUnreachableException, httpx.HTTPError))
        is_late = isinstance(error, client.TimeoutException) and not is_broken
        raise (_TooLong if is_late else SandboxError)(f"E2B: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
