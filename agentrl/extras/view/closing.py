"""The closing table of a run from its files."""

from __future__ import annotations

from pathlib import Path

from agentrl.controller.closing import closing_of
from agentrl.data.failures import FILE as FAILURES
from agentrl.data.failures import failure_lines
from agentrl.errors import CheckpointError
from agentrl.tracking.closing_table import RESULT, VALIDATIONS, ClosingTable, read_result, read_validations
from agentrl.tracking.metrics import StepRecord, read_metrics
from agentrl.types import BufferCounts


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
