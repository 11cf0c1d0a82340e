"""Boxes of Daytona: a sandbox of Daytona each, by Daytona's own client (agentrl/extras/boxes/README.md)."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shlex
import time
import uuid
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import trio

from agentrl.errors import ConfigError, DataError, SandboxError
from agentrl.extras.boxes.box import BoxMaker, OpenBox, Start
from agentrl.extras.boxes.leases import LABEL, FoundBox, own_lease
from agentrl.extras.boxes.machine_box import MachineBox, MachineGone
from agentrl.extras.boxes.served_box import filled

log = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_FOLDER = "work"
KEY_ENV = "DAYTONA_API_KEY"
START_S = 120
REQUEST_S = 30
"""Seconds for a request that runs no command."""
WAITS_S = (1.0, 2.0, 4.0, 8.0)
"""Before another try, if the answer does not say how long to wait."""
MAX_WAIT_S = 15.0
BUSY = frozenset({429})
"""Nothing was done: asked again, whatever it was."""
BROKEN = BUSY | {409, 500, 502, 503, 504}
"""Perhaps something was done: asked again if twice is as good as once."""
REFUSED = 400
NOT_FOUND = 404
STOPPED = ("stopping", "stopped", "archiving", "archived")
DELETE_AFTER_MIN = 1
"""A sandbox that has stopped is kept for this long: until then it can be told from one that Daytona lost."""


class DaytonaBoxes(BoxMaker):
    """Starts sandboxes without a network. The snapshot of a row is its image.

    image: snapshot of rows that name none; None: Daytona's own. folder: working folder, in that of the
    snapshot. lifetime_s: Daytona ends a sandbox that is older, counted in whole minutes. api_key: None: that
    of the client, DAYTONA_API_KEY.
    """

    def __init__(
        self,
        *,
        lifetime_s: float,
        image: str | None = None,
        folder: str | None = None,
        api_key: str | None = None,
    ) -> None:
        self._lifetime_min = math.ceil(lifetime_s / 60)
        self._image = image
        self._folder = folder or DEFAULT_FOLDER
        self._key = api_key

    def check(self) -> None:
        _client()
        if not (self._key or os.environ.get(KEY_ENV)):
            raise ConfigError(
                f"kind: daytona: there is no key: set the environment variable {KEY_ENV}, or name another "
                "one in api_key_env"
            )

    async def start(self, start: Start) -> OpenBox:
        image = start.image or self._image
        # Not abandoned: a sandbox that is made while this is cancelled must be ended.
        machine = await trio.to_thread.run_sync(lambda: self._machine(image))
        return await filled(MachineBox(machine, folder=self._folder), start)

    def found(self) -> list[FoundBox]:
        every = _asked(lambda: list(self._cloud.list(request_timeout=REQUEST_S)), again=BROKEN)
        return [FoundBox(one.id, one.labels[LABEL]) for one in every if LABEL in one.labels]

    def end(self, name: str) -> None:
        try:
            sandbox = _asked(lambda: self._cloud.get(name, request_timeout=REQUEST_S), again=BROKEN)
        except _NotFound:
            return
        _delete(sandbox)

    @cached_property
    def _cloud(self) -> Any:
        client = _client()
        key = self._key or os.environ.get(KEY_ENV)
        return client.Daytona(client.DaytonaConfig(api_key=key))

    def _machine(self, image: str | None) -> _DaytonaMachine:
        ends_at = time.monotonic() + 60 * self._lifetime_min
        try:
            made = _asked(lambda: self._made(image), again=BROKEN)
        except (_NotFound, _Refused) as error:  # an unknown snapshot is a bad request
            if image is None:
                raise
            raise DataError(f"image {image!r}: Daytona starts no such snapshot: {error}") from error
        return _DaytonaMachine(self._cloud, made, ends_at=ends_at)

    def _made(self, image: str | None) -> Any:
        """Create a sandbox, under a name of its own: what an error has left half made can be removed."""
        client, name = _client(), f"agentrl-{uuid.uuid4().hex}"
        asked = client.CreateSandboxFromSnapshotParams(
            name=name,
            snapshot=image,
            labels={LABEL: str(own_lease())},
            network_block_all=True,
            ttl_minutes=self._lifetime_min,
            auto_stop_interval=0,  # an agent may think for long
            auto_delete_interval=DELETE_AFTER_MIN,
        )
        try:
            return self._cloud.create(asked, timeout=START_S)
        except client.DaytonaError:
            try:
                self.end(name)
            except SandboxError as error:
                log.warning("sandbox %s may be left until its lifetime is over: %s", name, error)
            raise


class _DaytonaMachine:
    """A machine, by the client's object for it. ends_at: when Daytona ends it, by the monotonic clock."""

    def __init__(self, cloud: Any, sandbox: Any, *, ends_at: float) -> None:
        self._cloud = cloud
        self._sandbox = sandbox
        self._ends_at = ends_at

    def run(self, command: str, *, timeout_s: float) -> str | None:
        # Daytona joins both outputs of a command. Versions differ in whether they start a shell.
        quiet = f"sh -c {shlex.quote(f'{command} 2>/dev/null')}"
        seconds = math.ceil(timeout_s)
        try:
            done = self._played(lambda: self._sandbox.process.exec(quiet, timeout=seconds), again=BUSY)
        except _TooLong:  # what runs there keeps the servant from answering
            return None
        return str(done.result) if done.exit_code == 0 else None

    def write(self, path: str, content: bytes) -> None:
        self._played(lambda: self._sandbox.fs.upload_file(content, path, REQUEST_S), again=BROKEN)

    def read(self, path: str) -> bytes | None:
        try:
            return bytes(self._played(lambda: self._sandbox.fs.download_file(path, REQUEST_S), again=BROKEN))
        except _NotFound:  # the sandbox is there, its file is not
            return None

    def end(self) -> None:
        _delete(self._sandbox)

    def _played(self, method: Callable[[], T], *, again: frozenset[int]) -> T:
        """Ask the sandbox. If this fails, what became of the sandbox decides whose fault it is.

        Raises:
            MachineGone: its lifetime is over, or it has stopped, as after a command that killed its first
                process. SandboxError: Daytona lost it, or broke.
        """
        try:
            return _asked(method, again=again)
        except SandboxError as failure:
            try:
                found = _asked(
                    lambda: self._cloud.get(self._sandbox.id, request_timeout=REQUEST_S), again=BROKEN
                )
                state = str(found.state.value)
            except _NotFound:
                state = "destroyed"
            except _TooLong as error:  # that of a question is not that of a command
                raise SandboxError(str(error)) from error
            if state == "started":
                raise
            if state in STOPPED or time.monotonic() >= self._ends_at:
                raise MachineGone(f"its sandbox is {state}") from failure
            raise SandboxError(f"Daytona: the sandbox is {state} before its time") from failure


class _TooLong(SandboxError):
    """A command did not end in time, or its answer did not come."""


class _Refused(SandboxError):
    """Daytona does not do this."""


class _NotFound(SandboxError):
    """Daytona does not know this."""


def _delete(sandbox: Any) -> None:
    with contextlib.suppress(_NotFound):
        _asked(lambda: sandbox.delete(timeout=REQUEST_S), again=BROKEN)


def _asked(method: Callable[[], T], *, again: frozenset[int]) -> T:
    """Call a method of the client, again after each of the statuses in `again`, which the client does not.

    Raises:
        SandboxError: Daytona broke, or is busy for too long; its subclasses say more.
    """
    client = _client()
    for wait_s in (*WAITS_S, None):
        try:
            return method()
        except client.DaytonaError as error:
            status = _status(error)
            if status not in again or wait_s is None:
                raise _meaning(error, status) from error
            time.sleep(_asked_wait_s(error, wait_s))
    raise AssertionError("unreachable")


def _meaning(error: Any, status: int | None) -> SandboxError:
    line = f"Daytona: {' '.join(str(error).split())[:300] or type(error).__name__}"
    if status == NOT_FOUND:
        return _NotFound(line)
    if status == REFUSED:
        return _Refused(line)
    return (_TooLong if isinstance(error, _client().DaytonaTimeoutError) else SandboxError)(line)


def _status(error: Any) -> int | None:
    """Return the status of the answer that made an error. That of a download is in its cause only."""
    if error.status_code is not None:
        return int(error.status_code)
    return getattr(getattr(error.__cause__, "response", None), "status_code", None)


def _asked_wait_s(error: Any, otherwise: float) -> float:
    told = {str(name).lower(): value for name, value in (error.headers or {}).items()}.get("retry-after")
    try:
        return otherwise if told is None else min(max(float(told), 0.0), MAX_WAIT_S)
    except ValueError:  # a date
        return otherwise


def _client() -> Any:
    """Return the client's module.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import daytona
    except ImportError as error:
        raise ConfigError("kind: daytona needs Daytona's client: pip install 'agentrl[daytona]'") from error
    return daytona
