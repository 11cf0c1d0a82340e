"""Progress of an evaluation: a bar with the remaining time on a terminal, else an occasional line."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from agentrl.evaluation.concurrency import Concurrency
from agentrl.evaluation.time_left import TimeLeft
from agentrl.figures.attempts import attempt_of
from agentrl.tracking.progress import duration
from agentrl.types import SCORED_OUTCOMES, Trajectory

LINE_EVERY_S = 10.0
ESTIMATE_EVERY_S = 1.0


class EvalProgress:
    """Counts finished attempts. Use it as a context manager.

    Args:
        total: attempts of the whole evaluation.
        finished: those of them that earlier runs finished.
        concurrency: shown as the number of attempts at once.
        time_left: of the attempts that this process plays.
        is_scored: whether accuracy is shown.
        console: None: standard error. Tests pass their own.
    """

    def __init__(
        self,
        total: int,
        finished: int,
        concurrency: Concurrency,
        time_left: TimeLeft,
        *,
        is_scored: bool,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._finished = finished
        self._concurrency = concurrency
        self._time_left = time_left
        self._is_scored = is_scored
        self._clock = clock
        self._said = clock()
        self._estimate: tuple[float, float] | None = None  # seconds left, and when they were estimated
        self._played = self._failed = self._scored = 0
        self._accuracy = 0.0
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            _Facts(self),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("attempts", total=total, completed=finished)

    def __enter__(self) -> EvalProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Print one line above the bar."""
        self._console.print(Text(text), soft_wrap=True)

    def add(self, trajectory: Trajectory) -> None:
        """Count a finished attempt."""
        attempt = attempt_of(trajectory)
        self._played += 1
        self._failed += trajectory.outcome not in SCORED_OUTCOMES
        if attempt.accuracy is not None:
            self._scored += 1
            self._accuracy += attempt.accuracy
        self._bar.update(self._task, completed=self._finished + self._played)
        now = self._clock()
        if not self._console.is_terminal and now - self._said >= LINE_EVERY_S:
            self._said = now
            self.say(f"{self._finished + self._played} of {self._total} attempts; {self.facts()}")

    def facts(self) -> str:
        """Return the current figures: accuracy so far, failures, attempts at once, and remaining time.

        The accuracy is that of the attempts played by this process.
        """
        parts = [f"{self._concurrency.now} at once", f"done in {duration(self._left_s())}"]
        if self._is_scored and self._scored:
            parts.insert(0, f"accuracy {self._accuracy / self._scored:.3f} so far")
        if self._failed:
            parts.append(f"{self._failed} failed")
        return ", ".join(parts)

    def _left_s(self) -> float:
        now = self._clock()
        if self._estimate is None or now - self._estimate[1] >= ESTIMATE_EVERY_S:
            self._estimate = self._time_left.seconds(self._concurrency.now), now
        left_s, estimated_at = self._estimate
        return max(0.0, left_s - (now - estimated_at))


class _Facts(ProgressColumn):
    """The figures beside the bar."""

    def __init__(self, progress: EvalProgress) -> None:
        super().__init__()
        self._progress = progress

    def render(self, task: object) -> Text:
        return Text(self._progress.facts())
