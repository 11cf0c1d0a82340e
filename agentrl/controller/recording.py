"""Where the controller has trajectories written: by the recorder, or, in a replay, by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from agentrl.cluster.actors import Actor
from agentrl.cluster.recorder import WAIT_S, Recorded, Recorder, write_attempts
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.errors import DiskError, InfrastructureError
from agentrl.tracking.unwritten import UnwrittenFiles

WHAT = "trajectories"
MAX_WAIT_S = 600.0
"""How long a checkpoint waits for the trajectories up to its step: a disk that hangs must not hold it up."""
MAX_BEHIND = 8
"""Files that may wait to be written, because the disk is slow or full.

Further steps are not recorded until some are written: each is told and counted (`trainer/unwritten_files`).
"""
MAX_TRIES = 8
"""After so many failures, or deaths of the recorder, a file is given up: told and counted as well."""
PAUSE_S = 0.5
"""Before a recorder that does not answer is asked again."""


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


@dataclass(slots=True)
class _Waiting:
    """A file that is not written yet.

    num_tries: how often it failed, or a recorder died with it. is_given: the recorder should have it.
    has_former: what the recorder has is the file of a step that was undone, and is replaced by this.
    """

    step: int
    attempts: Sequence[AttemptFacts]
    columns: Mapping[str, int]
    num_tries: int = 0
    is_given: bool = False
    has_failed: bool = False
    has_former: bool = False


class RemoteRecording:
    """Lets the recorder write the files, without waiting for it.

    It keeps what was not written, and gives it to the recorder again: what failed with the next step, what
    died with a recorder at once. `wait` may be called in another thread.
    """

    def __init__(
        self, recorder: Actor[Recorder], unwritten: UnwrittenFiles, say: Callable[[str], None]
    ) -> None:
        self._recorder = recorder
        self._unwritten = unwritten
        self._say = say
        self._lock = threading.RLock()
        self._waiting: dict[str, _Waiting] = {}  # by path, in the order in which they were given

    @property
    def oldest_step(self) -> int | None:
        with self._lock:
            return min((file.step for file in self._waiting.values()), default=None)

    def write(self, path: Path, attempts: Sequence[AttemptFacts], *, step: int, **columns: int) -> None:
        name = str(path.resolve())
        with self._lock:
            if len(self._waiting) >= MAX_BEHIND:
                self._exchange()
            if (count := len(self._waiting)) >= MAX_BEHIND:
                error = DiskError(f"{name}: {count} earlier files still wait for a slow disk")
                self._unwritten.count(WHAT, error)
                return
            former = self._waiting.pop(name, None)
            has_former = former is not None and former.is_given and not former.has_failed
            file = _Waiting(
                step, attempts, {"step": step, **columns}, is_given=has_former, has_former=has_former
            )
            self._waiting[name] = file
            self._exchange(retries=True)

    def wait(self) -> None:
        """Wait until everything is written, at most MAX_WAIT_S, in any thread.

        It does not wait for what the disk refused: that is tried again with the next step.
        """
        deadline = time.monotonic() + MAX_WAIT_S
        while time.monotonic() < deadline and self._is_writing():
            self._pause()

    def finish(self) -> None:
        last_answer = time.monotonic()
        self._exchange(retries=True)
        while self._is_writing() and time.monotonic() - last_answer < MAX_WAIT_S:
            is_done = self._pause()
            if is_done is not None:
                last_answer = time.monotonic()
            if not is_done:
                count = len(self._waiting)
                self._say(f"waiting for the last trajectories to be written: {count} files left")

    def _is_writing(self) -> bool:
        """Return whether a file waits that did not fail, after an exchange with the recorder."""
        with self._lock:
            self._exchange()
            return any(not file.has_failed for file in self._waiting.values())

    def _pause(self) -> bool | None:
        """Wait for the recorder a little; return whether it has written all, None if it does not answer."""
        try:
            return self._recorder.run(Recorder.wait, WAIT_S)
        except InfrastructureError:
            time.sleep(PAUSE_S)
            return None

    def _exchange(self, *, retries: bool = False) -> None:
        """Look at what the recorder has written, and give it what it does not have.

        retries: also what it could not write.
        """
        try:
            news = self._recorder.run(Recorder.news)
            self._look_at(news)
            for name, file in list(self._waiting.items()):
                if name not in news.waiting and (retries or not file.has_failed):
                    self._recorder.run(Recorder.record, name, file.attempts, file.columns)
                    file.is_given, file.has_failed = True, False
        except InfrastructureError as error:
            self._unwritten.count(WHAT, error)

    def _look_at(self, news: Recorded) -> None:
        for path, why in news.failed.items():
            self._unwritten.count(WHAT, DiskError(f"{path}: {why}"))
        for path in [path for path in (*news.written, *news.failed) if path in self._waiting]:
            file = self._waiting[path]
            if file.has_former:
                file.is_given = file.has_former = False
            elif path in news.failed:
                file.has_failed = True
                self._count_try(path, news.failed[path])
            else:
                del self._waiting[path]
        lost = [path for path, file in self._waiting.items() if self._is_lost(path, file, news)]
        if lost:  # it was writing the first of them when it died
            self._say(f"the recorder died; it is given {len(lost)} files again")
            for path in lost:
                self._waiting[path].is_given = self._waiting[path].has_former = False
            self._count_try(lost[0], "the recorder died")
        if news.written and not news.failed:
            self._unwritten.clear(WHAT)

    def _is_lost(self, path: str, file: _Waiting, news: Recorded) -> bool:
        return file.is_given and not file.has_failed and path not in news.waiting

    def _count_try(self, path: str, why: str) -> None:
        file = self._waiting[path]
        file.num_tries += 1
        if file.num_tries == MAX_TRIES:
            del self._waiting[path]
            self._unwritten.count(WHAT, DiskError(f"{path}: not written in {MAX_TRIES} tries: {why}"))
