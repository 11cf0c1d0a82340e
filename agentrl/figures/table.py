"""The terminal table with the figures of an evaluation."""

from __future__ import annotations

from rich.table import Table

from agentrl.figures.summary import Estimate, EvalSummary, estimate_at


def summary_table(summary: EvalSummary) -> Table:
    """Return one line per data source, and an overall line if there are several.

    95 % intervals are in brackets.
    """
    n = max(source.n for source in summary.shown)
    of_several = (f"pass@{n}", f"maj@{n}") if n > 1 else ()
    table = Table("data set", "problems", f"mean@{n}", *of_several, "format", "truncated", "tokens", "failed")
    for source in summary.shown:
        several = (
            (with_interval(estimate_at(figures, n)) for figures in (source.pass_at, source.majority_at))
            if n > 1
            else ()
        )
        table.add_row(
            source.name,
            str(source.num_problems),
            with_interval(source.accuracy),
            *several,
            _value(source.format_rate),
            _value(source.truncation_rate),
            "-" if source.num_tokens is None else f"{source.num_tokens.value:.0f}",
            _value(source.failure_rate),
        )
    return table


def with_interval(estimate: Estimate | None) -> str:
    """Return a figure with its interval; a dash if there is no figure."""
    if estimate is None:
        return "-"
    interval = (
        "" if estimate.low is None or estimate.high is None else f" [{estimate.low:.3f}, {estimate.high:.3f}]"
    )
    return f"{estimate.value:.3f}{interval}"


def _value(estimate: Estimate | None) -> str:
    return "-" if estimate is None else f"{estimate.value:.3f}"
