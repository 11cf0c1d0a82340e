"""The line of the closing table about boxes."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.tracking.metrics import StepRecord


def box_lines(records: Sequence[StepRecord]) -> list[str]:
    """Return what boxes did in all steps; nothing if there were none."""
    totals = {
        name: sum(record.values.get(f"boxes/{name}", 0.0) for record in records)
        for name in ("started", "warm", "failed", "unhealthy", "box_s")
    }
    if not totals["started"] and not totals["failed"]:
        return []
    return [
        f"boxes: {totals['started']:.0f} started, {totals['warm']:.0f} of them warm; "
        f"{totals['failed']:.0f} starts failed, {totals['unhealthy']:.0f} warm ones did not answer; "
        f"{totals['box_s']:,.0f} s in use"
    ]
