"""Progress of a job with one loop and few numbers (SFT): a bar with ETA on a terminal, plain lines elsewhere; its metrics in a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from agentrl.tracking.metrics import MetricsFile, StepRecord
from agentrl.tracking.progress import duration

PLAIN_INTERVAL_S = 10.0
"""How often a log without a terminal gets a line."""


class JobProgress:
    """`with JobProgress("sft", total=100, file=...) as progress: progress.step(1, {"loss": 2.3})`."""

    def __init__(self, what: str, *, total: int, file: Path) -> None:
        self._what, self._total = what, total
        self._started = time.monotonic()
        self._last_line = self._started
        self._file = MetricsFile(file)
        console = Console(file=sys.stderr)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(what, total=total, text="")

    def __enter__(self) -> JobProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()
        self._file.close()

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Record step `step` (from 1); the first four values are shown."""
        now = time.monotonic()
        self._file.log(StepRecord("train", step, 0, now - self._started, {f"{self._what}/{name}": v for name, v in values.items()}))
        text = "  ".join(f"{name} {value:.4g}" for name, value in list(values.items())[:4])
        self._bar.update(self._task, completed=step, text=text)
        if self._bar.disable and (now - self._last_line > PLAIN_INTERVAL_S or step in (1, self._total)):
            self._last_line = now
            eta = duration((now - self._started) / step * (self._total - step))
            sys.stderr.write(f"{self._what} {step}/{self._total}  {text}  ETA {eta}\n")
            sys.stderr.flush()
