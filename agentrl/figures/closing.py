"""The closing table of a run, from what it knows at its end, or from its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.data.failures import FILE as FAILURES
from agentrl.data.failures import failure_lines
from agentrl.errors import CheckpointError
from agentrl.figures.opponent_lines import opponent_lines
from agentrl.tracking.attempts import ended_in
from agentrl.tracking.closing_table import (
    RESULT,
    VALIDATIONS,
    ClosingTable,
    closing_rows,
    read_result,
    read_validations,
)
from agentrl.tracking.compute import typical_compute_text
from agentrl.tracking.metrics import StepRecord, read_metrics
from agentrl.types import BufferCounts


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
