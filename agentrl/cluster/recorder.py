"""`Recorder`: writes the trajectories of trained batches to Parquet, in a process of its own.

The controller hands over which attempts a step learned from and goes on. The recorder writes one step after
the other; the buffer keeps their files until then. What it could not write, or had to write when it died, the
controller gives to it again (`agentrl.controller.recording`). A training never waits for its own record.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa

from agentrl import heap
from agentrl.cluster.actors import Actor, ActorKind
from agentrl.cluster.pools import beside_driver
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.trajectories import encode, write_parquet_batches
from agentrl.errors import AgentRLError
from agentrl.types import Trajectory

MAX_BATCH_TOKENS = 1 << 22
"""Tokens that are encoded at once, which bounds the recorder's memory."""
WAIT_S = 5.0
"""Duration of one long poll for the recorder to catch up."""

RECORDER = ActorKind("Recorder", "the recorder", timeout_s=60.0, num_threads=2, long_polls={"wait": 4})

Columns = Mapping[str, int | float | str]


@dataclass(frozen=True, slots=True)
class Recorded:
    """What happened to files since the last call.

    failed: path -> why it could not be written. waiting: paths that are still to be written.
    """

    written: tuple[str, ...]
    failed: Mapping[str, str]
    waiting: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Job:
    path: str
    attempts: Sequence[AttemptFacts]
    columns: Columns


def launch_recorder() -> Actor[Recorder]:
    """Start the recorder beside the controller. A dead one is started again, without what it had to write."""
    return RECORDER.launch({"max_restarts": -1, "scheduling_strategy": beside_driver()}, Recorder)


class Recorder:
    """Writes files of trajectories in the background, in the order in which they were given."""

    def __init__(self) -> None:
        self._jobs: deque[_Job] = deque()
        self._written: list[str] = []
        self._failed: dict[str, str] = {}
        self._changed = threading.Condition()
        self._writing: tuple[str, ...] = ()  # the file that is being written
        threading.Thread(target=self._run, name="recorder", daemon=True).start()

    def record(self, path: str, attempts: Sequence[AttemptFacts], columns: Columns) -> None:
        """Queue the attempts to be written to `path`, with these columns."""
        with self._changed:
            self._jobs.append(_Job(path, attempts, columns))
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until everything is written, at most `timeout_s`; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._writing, timeout_s)

    def news(self) -> Recorded:
        """Return what happened since the last call."""
        with self._changed:
            waiting = (*self._writing, *(job.path for job in self._jobs))
            found = Recorded(tuple(self._written), dict(self._failed), waiting)
            self._written.clear()
            self._failed.clear()
            return found

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._jobs))
                job = self._jobs.popleft()
                self._writing = (job.path,)
            why = _error_of(partial(write_attempts, Path(job.path), job.attempts, job.columns))
            heap.release_free_memory()
            with self._changed:
                self._writing = ()
                if why is None:
                    self._written.append(job.path)
                else:
                    self._failed[job.path] = why
                self._changed.notify_all()


def _error_of(write: Callable[[], object]) -> str | None:
    try:
        write()
    except OSError as error:
        return f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    except AgentRLError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - boundary of one file
        return f"{type(error).__name__}: {error}"
    return None


def write_attempts(path: Path, attempts: Sequence[AttemptFacts], columns: Columns) -> None:
    """Write attempts to a Parquet file, a bounded number of tokens at a time.

    Raises:
        OSError: the file could not be written.
        DiskError: a trajectory is damaged.
    """
    write_parquet_batches(path, _encoded(attempts), **columns)


def _encoded(attempts: Sequence[AttemptFacts]) -> Iterator[pa.RecordBatch]:
    waiting: list[Trajectory] = []
    num_tokens = 0
    for attempt in attempts:
        if num_tokens >= MAX_BATCH_TOKENS:
            yield encode(waiting)
            waiting, num_tokens = [], 0
        waiting.append(attempt.load())
        num_tokens += attempt.num_tokens
    yield encode(waiting)
