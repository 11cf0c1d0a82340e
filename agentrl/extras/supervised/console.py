"""`JobConsole`: console of a supervised job: a progress bar with ETA on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from agentrl.tracking.console import QuietConsole
from agentrl.tracking.metrics import StepRecord
from agentrl.tracking.progress import duration

PLAIN_INTERVAL_S = 10.0
"""Seconds between lines when standard error is not a terminal."""
NUM_SHOWN = 4


class JobConsole(QuietConsole):
    """Console for one `train` record per update, from 1 to `total`, and for validations between them."""

    def __init__(
        self, what: str, *, total: int, restored_step: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`restored_step`: updates made by earlier processes, which do not count toward the speed."""
        self._what, self._total = what, total
        self._clock = clock
        self._restored_step = restored_step
        self._started = clock()
        self._last_line = self._started
        console = RichConsole(file=sys.stderr)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Bar(
            *columns, TextColumn("{task.fields[text]}"), console=console, disable=not console.is_terminal
        )
        self._task = self._bar.add_task(what, total=total, completed=restored_step, text="")

    def say(self, text: str) -> None:
        if self._bar.disable:
            sys.stderr.write(f"{self._what}: {text}\n")
            sys.stderr.flush()
        else:
            self._bar.console.print(f"{self._what}: {text}", markup=False, highlight=False)

    def set_total_steps(self, total_steps: int) -> None:
        self._total = total_steps
        self._started = self._last_line = self._clock()
        self._bar.reset(self._task, total=total_steps, completed=self._restored_step)

    def log(self, record: StepRecord) -> None:
        if record.step <= self._restored_step:  # a record of an earlier process
            return
        text = _values(record.values)
        if record.kind == "validation":
            self.say(f"update {record.step}  {text}")
            return
        self._bar.start()
        self._bar.update(self._task, completed=record.step, text=text)
        now = self._clock()
        if self._bar.disable and (
            now - self._last_line > PLAIN_INTERVAL_S or record.step in (self._restored_step + 1, self._total)
        ):
            self._last_line = now
            eta_s = (now - self._started) / (record.step - self._restored_step) * (self._total - record.step)
            sys.stderr.write(f"{self._what} {record.step}/{self._total}  {text}  ETA {duration(eta_s)}\n")
            sys.stderr.flush()

    def close(self) -> None:
        self._bar.stop()


def _values(values: Mapping[str, float]) -> str:
    return "  ".join(
        f"{name.rpartition('/')[2]} {value:.4g}" for name, value in list(values.items())[:NUM_SHOWN]
    )
