"""Records of steps and validations, the timer of a step's phases, and the records' file: `metrics.jsonl`, one
flat JSON object per line.

```
{"kind": "train", "step": 12, "version": 13, "wall_s": 41.7, "rollout/accuracy": 0.7, "learner/loss": null}
```
Keys without a slash are fields of the record; every metric's name has a slash. Non-finite values are null.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import orjson

from agentrl.errors import CheckpointError, InfrastructureError
from agentrl.tracking.seals import checked_lines, sealed_line
from agentrl.tracking.unwritten import AppendedFile

Kind = Literal["train", "validation"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The metrics of one step, or of a validation.

    step: batches trained on so far, 0 for a validation before training. version: of the measured policy.
    wall_s: seconds of running time since the start of the run, without gaps between a stop and a resume.
    values: metric name (with a namespace, `rollout/reward_mean`) -> value; NaN if it is not defined.
    """

    kind: Kind
    step: int
    version: int
    wall_s: float
    values: Mapping[str, float] = field(default_factory=dict)

    def shown(self) -> dict[str, float]:
        """Return what every tracker shows at `step`, under the same names: the finite values, `version` and
        `wall_s`.
        """
        finite = {name: float(value) for name, value in self.values.items() if math.isfinite(value)}
        return {**finite, "version": float(self.version), "wall_s": round(self.wall_s, 3)}

    def to_line(self) -> bytes:
        """Return the record as one line of JSON, newline included."""
        values = {name: float(value) if math.isfinite(value) else None for name, value in self.values.items()}
        own = {"kind": self.kind, "step": self.step, "version": self.version, "wall_s": round(self.wall_s, 3)}
        return orjson.dumps({**own, **values}, option=orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def from_line(cls, line: bytes) -> StepRecord:
        """Read a line that `to_line` wrote. Raises ValueError or KeyError for anything else."""
        raw = orjson.loads(line)
        values = {
            name: math.nan if value is None else float(value) for name, value in raw.items() if "/" in name
        }
        return cls(
            cast(Kind, raw["kind"]), int(raw["step"]), int(raw["version"]), float(raw["wall_s"]), values
        )


def read_metrics(path: Path) -> list[StepRecord]:
    """Read all records of a `metrics.jsonl`, in the order written.

    A last line without a newline was cut off by a crash and is ignored.

    Raises:
        CheckpointError: another line is not a record, or was changed, or a line is missing before it; the
            message has its number.
    """
    records = []
    for number, line in enumerate(checked_lines(path), start=1):
        try:
            records.append(StepRecord.from_line(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path}, line {number}: not a metrics record ({error}); move the file away to continue"
            ) from error
    return records


class MetricsFile:
    """Appends records to a `metrics.jsonl`. Every run has it, whatever its other trackers are.

    Each record is written to the operating system at once, so that a killed process loses none. The file is
    synced to the disk (fsync) only when it is closed or rewritten.
    """

    def __init__(self, path: Path, *, restored_step: int | None = None) -> None:
        """Open `path`.

        Args:
            restored_step: step of the checkpoint that the run resumes from; later records are cut off,
                because the run repeats those steps. None starts a new file; an existing one is renamed to
                `metrics.1.jsonl`, ...

        Raises:
            CheckpointError: the existing file is damaged.
            InfrastructureError: the file cannot be written.
        """
        self.path = path
        self._is_closed = False
        self.kept: tuple[StepRecord, ...] = ()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and restored_step is None:
                path.rename(_free_name(path))
            elif path.exists() and restored_step is not None:
                self.kept = tuple(record for record in read_metrics(path) if record.step <= restored_step)
                _replace(path, self.kept)
            self._file = AppendedFile(path)
            self._file.flush()
        except OSError as error:
            raise _unwritable(path, error) from error

    @property
    def last_wall_s(self) -> float:
        """Running time in seconds at the last record from before the resume; 0.0 without one."""
        return self.kept[-1].wall_s if self.kept else 0.0

    def log(self, record: StepRecord) -> None:
        """Append one record.

        Raises InfrastructureError if the disk refuses it; the next call or `close` retries.
        """
        self._is_closed = False
        try:
            self._file.append_records(record.to_line())
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def go_back(self, step: int) -> None:
        """Cut off the records after `step`, whose steps are repeated. `kept` are the records that remain.

        Raises:
            CheckpointError: the file is damaged.
            InfrastructureError: the file cannot be written, and stays as it is.
        """
        try:
            self._file.flush()
            self.kept = tuple(record for record in read_metrics(self.path) if record.step <= step)
            _replace(self.path, self.kept)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        finally:
            # the name belongs to another file after the replace; the next record reopens it
            self._file.close()

    def close(self) -> None:
        """Flush and sync everything to the disk. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _unwritable(self.path, error) from error
        finally:
            self._file.close()


def _replace(path: Path, records: Sequence[StepRecord]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    checksum = 0
    with partial.open("wb") as file:
        for record in records:
            line, checksum = sealed_line(record.to_line(), checksum)
            file.write(line)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return candidate


def _unwritable(path: Path, error: OSError) -> InfrastructureError:
    return InfrastructureError(
        f"cannot write {path}: {error.strerror or error}; free some space there or choose another "
        "trainer.run_dir"
    )


class PhaseTimer:
    """Adds up the seconds of named phases: `with timer("update"): ...`. Phases do not nest; one thread times
    them.

    `on_phase` is called with the name of a phase when it begins, and with None when it ends.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_phase: Callable[[str | None], None] | None = None,
    ) -> None:
        self._clock = clock
        self._on_phase = on_phase
        self._seconds: dict[str, float] = {}
        self._now: tuple[str | None, float] = (
            None,
            clock(),
        )  # replaced as a whole, so that readers need no lock
        self._step_start = clock()

    @property
    def current(self) -> tuple[str | None, float]:
        """The current phase and its start (by `clock`); between phases None and the end of the last one.

        For any thread.
        """
        return self._now

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time one phase, also if it raises."""
        running, _ = self._now
        assert running is None, f"phase {phase!r} inside of {running!r}: seconds would be counted twice"
        start = self._enter(phase)
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self._enter(None) - start

    def finish_step(self) -> dict[str, float]:
        """Return the step's times and start the next step.

        Returns:
            `time/<phase>_s` and `time/step_s`: seconds; a step lasts from one call to the next;
            `time/share/<phase>`: share of the step, in [0, 1]; absent for a step of no duration.
        """
        now = self._clock()
        step_s = now - self._step_start
        values = {f"time/{phase}_s": seconds for phase, seconds in self._seconds.items()}
        if step_s > 0:
            values |= {f"time/share/{phase}": seconds / step_s for phase, seconds in self._seconds.items()}
        self._seconds = {}
        self._step_start = now
        return {**values, "time/step_s": step_s}

    def _enter(self, phase: str | None) -> float:
        self._now = (phase, self._clock())
        if self._on_phase is not None:
            self._on_phase(phase)
        return self._now[1]
