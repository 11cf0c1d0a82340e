"""Sends records to `metrics.jsonl`, always, and to the trackers of `trainer.logger`.

Trackers are imported only when used: they take a while to load.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from agentrl.registered import required
from agentrl.tracking.alarms import Alarm
from agentrl.tracking.attempt_table import SampledAttempts
from agentrl.tracking.console import Console, QuietConsole, open_console
from agentrl.tracking.metrics import Kind, MetricsFile, StepRecord
from agentrl.tracking.redact import redact, without_users
from agentrl.tracking.unwritten import UnwrittenFiles

WandbMode = Literal["online", "offline", "disabled"]


class Tracker(Protocol):
    """Stores records, alarms and tables of attempts. `close` waits until all are stored."""

    def log(self, record: StepRecord) -> None: ...

    def log_alarm(self, alarm: Alarm) -> None: ...

    def log_attempts(self, table: SampledAttempts) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is opened with. A package registers `f(run: TrackedRun) -> Tracker | None` in
    `agentrl.trackers`.

    config: of the run, without secrets.
    restored_step: step of the checkpoint that is resumed; None for a new run.
    wandb_mode, mlflow_uri: of `tracking`.
    """

    run_dir: Path
    project: str
    experiment: str
    config: Mapping[str, Any]
    restored_step: int | None = None
    wandb_mode: WandbMode = "offline"
    mlflow_uri: str | None = None


@runtime_checkable
class GoesBack(Protocol):
    """A tracker that can discard the records after a step."""

    def go_back(self, step: int) -> None: ...


class Trackers(AbstractContextManager["Trackers"]):
    """Sends each record to the metrics file, the console and other trackers ("guests"); a context manager.

    A guest that fails (the network, a service) is reported once and then left out: it never ends a run.
    The metrics file is never left out: records that its disk refuses are retried with the next record.
    """

    def __init__(
        self,
        metrics: MetricsFile,
        console: Console,
        guests: Mapping[str, Tracker] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics = metrics
        self.console = console
        self.unwritten = UnwrittenFiles(console.say)
        self._guests = dict(guests or {})
        self._clock = clock
        self._start = clock() - metrics.last_wall_s
        console.restore(metrics.kept)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the guests that still work."""
        return tuple(self._guests)

    def write(self, kind: Kind, *, step: int, version: int, values: Mapping[str, float]) -> StepRecord:
        """Make a record with the current running time, log it and return it."""
        record = StepRecord(kind, step, version, self._clock() - self._start, values)
        self.log(record)
        return record

    def log(self, record: StepRecord) -> None:
        """Send one record to all trackers."""
        self.unwritten.attempt(self.metrics.path.name, partial(self.metrics.log, record))
        self.console.log(record)
        for name, guest in tuple(self._guests.items()):
            self._call(name, guest.log, record)

    def log_alarm(self, alarm: Alarm) -> None:
        """Send an alarm to the guests."""
        for name, guest in tuple(self._guests.items()):
            self._call(name, guest.log_alarm, alarm)

    def log_attempts(self, table: SampledAttempts) -> None:
        """Send sampled attempts to the guests. The run folder has all of them."""
        for name, guest in tuple(self._guests.items()):
            self._call(name, guest.log_attempts, table)

    def go_back(self, step: int) -> None:
        """Discard the records after `step`: the run repeats those steps.

        A guest that cannot go back shows both.
        """
        self.unwritten.attempt(self.metrics.path.name, partial(self.metrics.go_back, step))
        for name, guest in tuple(self._guests.items()):
            if isinstance(guest, GoesBack):
                self._call(name, guest.go_back, step)

    def close(self) -> None:
        """Close all trackers. Idempotent."""
        for name, guest in tuple(self._guests.items()):
            self._call(name, guest.close)
        self._guests.clear()
        try:
            self.unwritten.attempt(self.metrics.path.name, self.metrics.close)
        finally:
            self.console.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, name: str, verb: Callable[..., None], *arguments: object) -> None:
        try:
            verb(*arguments)
        except Exception as error:  # noqa: BLE001 - boundary: a third party's client may raise anything
            self._guests.pop(name, None)
            self.console.say(
                f"tracker {name} failed and is disabled ({_one_line(error)}); metrics.jsonl has everything"
            )


def open_trackers(
    logger: Sequence[str],
    *,
    wandb_mode: WandbMode,
    mlflow_uri: str | None,
    run_dir: Path,
    project: str,
    experiment: str,
    resolved_config: Mapping[str, Any],
    total_steps: int | None = None,
    restored_step: int | None = None,
    console: Console | None = None,
) -> Trackers:
    """Open `run_dir/metrics.jsonl` and every tracker that `logger` names.

    Args:
        mlflow_uri: see MlflowTracker.
        resolved_config: shown by trackers, after secrets were replaced.
        total_steps: of the whole run, for the console's progress; None if unknown.
        restored_step: step of the checkpoint that is resumed; None for a new run.
        console: used if `logger` names the console, instead of a training run's; closed with the trackers.

    Raises:
        ConfigError: wandb should be online but has no key, or MLflow is not installed.
        InfrastructureError: the run folder cannot be written.
    """
    run = TrackedRun(
        run_dir,
        project=project,
        experiment=experiment,
        config=redact(resolved_config),
        restored_step=restored_step,
        wandb_mode=wandb_mode,
        mlflow_uri=mlflow_uri,
    )
    unused = ("console", "wandb") if wandb_mode == "disabled" else ("console",)
    openers = {name: partial(_open, name, run) for name in logger if name not in unused}
    # if a later one fails to open, the terminal is released before the error is shown
    with ExitStack() as opened:
        metrics = MetricsFile(run_dir / "metrics.jsonl", restored_step=restored_step)
        opened.callback(metrics.close)
        if "console" not in logger:
            console = QuietConsole()
        elif console is None:
            console = open_console(
                total_steps,
                title=f"{project} / {experiment}",
                look=f"agentrl view {shlex.quote(str(run_dir))}",
                log_file=run_dir / "console.log",
            )
        opened.callback(console.close)
        trackers = Trackers(metrics, console, _open_guests(openers, console))
        opened.pop_all()
    return trackers


def _open(name: str, run: TrackedRun) -> Tracker | None:
    found: Tracker | None = required("agentrl.trackers", name, by=f"trainer.logger={name}")(run)
    return found


def _open_guests(openers: Mapping[str, Callable[[], Tracker | None]], console: Console) -> dict[str, Tracker]:
    guests: dict[str, Tracker] = {}
    for name, opener in openers.items():
        try:
            if (guest := opener()) is not None:
                guests[name] = guest
        except (OSError, RuntimeError, TimeoutError) as error:
            console.say(
                f"tracker {name} could not start and is disabled ({_one_line(error)}); metrics.jsonl has "
                "everything"
            )
    return guests


def _one_line(error: BaseException) -> str:
    lines = without_users(str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
