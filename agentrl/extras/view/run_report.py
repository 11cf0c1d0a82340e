"""Writes `summary.md` and `report.png` from a run's folder.

The run may have ended, been interrupted, or be live.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from agentrl.data.failures import FILE as FAILURES
from agentrl.data.failures import failure_lines
from agentrl.errors import CheckpointError, DataError
from agentrl.extras.view.opponent_lines import opponent_lines
from agentrl.tracking.attempts import ended_in
from agentrl.tracking.closing_table import (
    RESULT,
    VALIDATIONS,
    ClosingTable,
    closing_rows,
    read_result,
    read_validations,
    write_summary,
)
from agentrl.tracking.compute import typical_compute_text
from agentrl.tracking.metrics import StepRecord, read_metrics
from agentrl.tracking.seals import check_text
from agentrl.types import BufferCounts

END_TIMEOUT_S = 10.0


def report_run(folder: Path) -> list[Path]:
    """Write `summary.md` and `report.png` of a run again, and return their paths.

    Raises:
        DataError: `folder` is not that of a training run.
        CheckpointError: a file of the run is damaged, or no step has been recorded yet.
        InfrastructureError: the files cannot be written.
    """
    if not (folder / "metrics.jsonl").is_file():
        raise DataError(f"{str(folder)!r} is not the folder of a training run: it has no metrics.jsonl")
    from agentrl.extras.view.run_picture import draw_report  # matplotlib takes a second to load

    picture = draw_report(folder, max_staleness=_max_staleness(folder))
    summary = folder / "summary.md"
    write_summary(closing_table(folder), summary, title=str(folder))
    return [summary, picture]


def closing_of(
    results: Mapping[str, Mapping[str, float]],
    *,
    step: int,
    version: int,
    counts: BufferCounts,
    records: Sequence[StepRecord],
    failures: Sequence[str],
) -> ClosingTable:
    """Return the closing table: validations, and notes on how groups and attempts ended.

    Args:
        results: metrics of each validation by the name of its policy.
        records: all records of the run's `metrics.jsonl`.
        failures: lines about the most common failures.
    """
    ended = ended_in(records)
    notes = [f"{step} steps, version {version}", f"groups: {counts}"]
    notes += [f"attempts: {ended.words()}"] if ended.num_ended else []
    notes += (
        [f"updates, medians over steps: {computed}"] if (computed := typical_compute_text(records)) else []
    )
    notes += [boxes] if (boxes := boxes_text(records)) else []
    notes += opponent_lines(records)
    notes += ["failures, validation included:", *(f"  {line}" for line in failures)] if failures else []
    return ClosingTable(closing_rows(results, step=step), notes)


def boxes_text(records: Sequence[StepRecord]) -> str:
    """Return what boxes did in all steps, "" if there were none."""
    totals = {
        name: sum(record.values.get(f"boxes/{name}", 0.0) for record in records)
        for name in ("started", "warm", "failed", "unhealthy", "box_s")
    }
    if not totals["started"] and not totals["failed"]:
        return ""
    return (
        f"boxes: {totals['started']:.0f} started, {totals['warm']:.0f} of them warm; "
        f"{totals['failed']:.0f} starts failed, {totals['unhealthy']:.0f} warm ones did not answer; "
        f"{totals['box_s']:,.0f} s in use"
    )


class ReportRefresher:
    """Refreshes a run's report periodically in a child process, because drawing takes seconds."""

    def __init__(self, folder: Path, *, interval_s: float, say: Callable[[str], None]) -> None:
        """`interval_s`: seconds between refreshes; 0: never."""
        guard = ["-m", "agentrl.guard", "--whole-tree", "--parent-pid", str(os.getpid()), "--"]
        self._command = [sys.executable, *guard, sys.executable, "-m", "agentrl.cli", "report", str(folder)]
        self._interval_s = interval_s
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._begun = time.monotonic()

    def consider(self) -> None:
        """Start a refresh if one is due and none is running.

        Never raises: a failed report must not end the run.
        """
        if not self._interval_s or time.monotonic() - self._begun < self._interval_s or not self._is_free():
            return
        self._begun = time.monotonic()
        self._errors.seek(0)
        self._errors.truncate()
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._errors
            )
        except OSError as error:
            self._say(f"the report cannot be refreshed: {error}")

    def close(self) -> None:
        """Kill a running refresh. The run writes its report at the end anyway."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()  # the guard ends the refresh
            self._process.wait(END_TIMEOUT_S)
        self._errors.close()

    def _is_free(self) -> bool:
        if self._process is None:
            return True
        status = self._process.poll()
        if status:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            self._say(f"the report was not refreshed: {lines[-1] if lines else f'exit code {status}'}")
        if status is not None:
            self._process = None
        return status is not None


def closing_table(folder: Path) -> ClosingTable:
    """Return the closing table of the run in a folder, from its files."""
    records = read_metrics(folder / "metrics.jsonl")
    steps = [record for record in records if record.kind == "train"]
    if not records:
        raise CheckpointError(f"{folder / 'metrics.jsonl'} contains no record")
    last = steps[-1] if steps else records[-1]
    ended = read_result(folder / RESULT)
    if ended is not None and ended[0] > last.step:
        raise CheckpointError(
            f"{folder / 'metrics.jsonl'} lacks lines: it ends with step {last.step}, {RESULT} is of step "
            f"{ended[0]}"
        )
    return closing_of(
        read_validations(folder / VALIDATIONS),
        step=last.step,
        version=last.version,
        counts=ended[1] if ended is not None and ended[0] == last.step else _counts(last),
        records=records,
        failures=failure_lines(folder / FAILURES),
    )


def _counts(record: StepRecord) -> BufferCounts:
    """Return the counts of groups by state when the step was recorded."""
    own = {
        name.removeprefix("buffer/"): int(value)
        for name, value in record.values.items()
        if name.startswith("buffer/")
    }
    reasons = {
        what: {
            name.removeprefix(f"{what}_"): count for name, count in own.items() if name.startswith(f"{what}_")
        }
        for what in ("dropped", "discarded")
    }
    drawn, queued, leased, ready, consumed = (
        own.get(name, 0) for name in ("drawn", "queued", "leased", "ready", "consumed")
    )
    return BufferCounts(
        drawn, queued, leased, ready, consumed, dropped=reasons["dropped"], discarded=reasons["discarded"]
    )


def _max_staleness(folder: Path) -> int | None:
    """Return the staleness bound from the run's config; None without a config file."""
    from agentrl.config.compose import load_config

    file = folder / "config.yaml"
    check_text(file)
    return load_config(str(file)).buffer.max_staleness if file.is_file() else None
