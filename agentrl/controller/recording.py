"""Where the controller has trajectories written: by the recorder, or, in a replay, by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from agentrl.data.attempt_facts import AttemptFacts
from agentrl.errors import DiskError, InfrastructureError
from agentrl.fleet.recorder import WAIT_S, Recorded, Recorder, write_attempts
from agentrl.tracking.unwritten import UnwrittenFiles
from agentrl.workers.actors import Actor

WHAT = "trajectories"
MAX_WAIT_S = 600.0
"""How long a checkpoint waits for the trajectories up to its step: a disk that hangs must not hold it up."""


class Recording(Protocol):
    """Writes attempts to Parquet files; a failed write is reported and counted."""

    def write(self, path: Path, attempts: Sequence[AttemptFacts], *, step: int, **columns: int) -> None: ...

    @property
    def oldest_step(self) -> int | None:
        """The first step of which something is still to be written; None: everything is written."""

    def finish(self) -> None:
        """Wait until everything is written."""


class LocalRecording:
    """Writes the files at once, in this process."""

    def __init__(self, unwritten: UnwrittenFiles) -> None:
        self._unwritten = unwritten

    @property
    def oldest_step(self) -> int | None:
        return None

    def write(self, path: Path, attempts: Sequence[AttemptFacts], *, step: int, **columns: int) -> None:
        self._unwritten.attempt(WHAT, partial(write_attempts, path, attempts, {"step": step, **columns}))

    def finish(self) -> None:
        """Return at once: everything is written."""


class RemoteRecording:
    """Lets the recorder write the files, without waiting for it."""

    def __init__(
        self, recorder: Actor[Recorder], unwritten: UnwrittenFiles, say: Callable[[str], None]
    ) -> None:
        self._recorder = recorder
        self._unwritten = unwritten
        self._say = say
        self._waiting: dict[str, int] = {}  # path -> step, in the order in which they were given

    @property
    def oldest_step(self) -> int | None:
        return min(self._waiting.values(), default=None)

    def write(self, path: Path, attempts: Sequence[AttemptFacts], *, step: int, **columns: int) -> None:
        name = str(path.resolve())
        self._waiting[name] = step
        try:
            news = self._recorder.run(Recorder.record, name, attempts, {"step": step, **columns})
        except InfrastructureError as error:
            del self._waiting[name]
            self._unwritten.count(WHAT, error)
        else:
            self._look_at(news)

    def wait(self) -> None:
        """Wait until everything is written, at most MAX_WAIT_S, in any thread.

        A recorder that died has nothing left to write.
        """
        deadline = time.monotonic() + MAX_WAIT_S
        with suppress(InfrastructureError):
            while time.monotonic() < deadline and not self._recorder.run(Recorder.wait, WAIT_S):
                pass

    def finish(self) -> None:
        try:
            while not self._recorder.run(Recorder.wait, WAIT_S):
                self._look_at(self._recorder.run(Recorder.news))
                self._say(f"waiting for the last trajectories to be written: {len(self._waiting)} files left")
            self._look_at(self._recorder.run(Recorder.news))
        except InfrastructureError as error:
            self._unwritten.count(WHAT, error)

    def _look_at(self, news: Recorded) -> None:
        for path, why in news.failed.items():
            self._unwritten.count(WHAT, DiskError(f"{path}: {why}"))
        if news.written:
            self._unwritten.clear(WHAT)
        for path in (*news.written, *news.failed):
            self._waiting.pop(path, None)
        for path in list(self._waiting)[: len(self._waiting) - news.num_waiting]:
            del self._waiting[path]  # the recorder was started again
            self._unwritten.count(WHAT, DiskError(f"{path}: the recorder died before it was written"))
