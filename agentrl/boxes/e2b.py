"""Boxes of E2B: a micro virtual machine each, by E2B's own client (docs/boxes.md)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, TypeVar

import httpx
import trio

from agentrl.boxes.box import BoxMaker, OpenBox, Start
from agentrl.boxes.leases import LABEL, FoundBox, own_lease
from agentrl.boxes.machine_box import MachineBox, MachineGone
from agentrl.boxes.served_box import filled
from agentrl.errors import ConfigError, DataError, SandboxError

T = TypeVar("T")

DEFAULT_FOLDER = "work"
NOT_FOUND = 404


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
        return _E2bMachine(made)


class _E2bMachine:
    """A machine, by the client's object for it."""

    def __init__(self, sandbox: Any) -> None:
        self._sandbox = sandbox

    def run(self, command: str, *, timeout_s: float) -> str | None:
        client = _client()
        try:
            return str(_asked(lambda: self._sandbox.commands.run(command, timeout=timeout_s)).stdout)
        except client.CommandExitException:
            return None
        except client.TimeoutException as error:
            if _asked(self._sandbox.is_running):  # what runs there keeps the servant from answering
                return None
            raise MachineGone(_line(error)) from error

    def write(self, path: str, content: bytes) -> None:
        _asked(lambda: self._sandbox.files.write(path, content, use_octet_stream=True))

    def read(self, path: str) -> bytes:
        return bytes(_asked(lambda: self._sandbox.files.read(path, format="bytes")))

    def end(self) -> None:
        _asked(self._sandbox.kill)


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
        MachineGone: E2B does not know the machine, or the template. SandboxError: E2B broke.
        CommandExitException, TimeoutException: of the client, for a command that failed or took too long.
    """
    from e2b import exceptions

    client = _client()
    try:
        return method()
    except (exceptions.NotFoundException, exceptions.SandboxNotRunningException) as error:
        raise MachineGone(_line(error)) from error
    except client.CommandExitException:
        raise
    except Exception as error:
        if getattr(error, "status_code", None) == NOT_FOUND:
            raise MachineGone(_line(error)) from error
        is_broken = isinstance(error, (exceptions.SandboxUnreachableException, httpx.HTTPError))
        if isinstance(error, client.TimeoutException) and not is_broken:
            raise
        raise SandboxError(f"E2B: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
