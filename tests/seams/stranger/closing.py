"""Lines for the end of a run, and a function that fails."""

from collections.abc import Sequence

from agentrl.tracking.metrics import StepRecord


def played(records: Sequence[StepRecord]) -> list[str]:
    return [f"diary: {sum(record.values.get('diary/attempts', 0.0) for record in records):.0f} attempts"]


def broken(records: Sequence[StepRecord]) -> list[str]:
    raise ZeroDivisionError("no such world")
