"""The closing table of a run, from what it knows at its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from agentrl.plugins.blame import failure_of
from agentrl.registered import registered
from agentrl.tracking.attempts import ended_in
from agentrl.tracking.closing_table import ClosingTable, closing_rows
from agentrl.tracking.compute import typical_compute_text
from agentrl.tracking.metrics import StepRecord
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
    notes += _notes_of_others(records)
    notes += ["failures, validation included:", *(f"  {line}" for line in failures)] if failures else []
    return ClosingTable(closing_rows(results, step=step), notes)


def _notes_of_others(records: Sequence[StepRecord]) -> Iterator[str]:
    """Yield what packages tell about a run: each entry point of `agentrl.closing_notes` is a function of the
    records that returns lines.
    """
    for name, one in registered("agentrl.closing_notes").items():
        try:
            yield from one.load()(records)
        except Exception as error:  # noqa: BLE001 - others' code must not take the table from a finished run
            yield f"notes {name!r} of {one.owner} failed: {failure_of(error)}"
