"""`agentrl compare`: its options, its table on the terminal, and the files that it writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.options import Debug

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from agentrl.extras.research.compare import Comparison, Difference, ProblemPair
    from agentrl.figures.summary import Estimate

MAX_SHOWN = 10
"""Maximum number of problems won, and of problems lost, on the terminal. The files list all."""

COLUMNS = ("source", "A", "B", "B - A", "95 %", "p", "won", "lost", "of")
PROBLEM_COLUMNS = ("source", "problem", "A", "B")


def compare(
    run_a: Annotated[
        Path, typer.Argument(metavar="RUN_A", help="Folder of an evaluation, or a Parquet file of attempts.")
    ],
    run_b: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_B", help="The other evaluation, in the same form; differences are B - A."
        ),
    ],
    common: Annotated[
        bool, typer.Option("--common", help="Compare only the problems that are in both evaluations.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write comparison.json and comparison.md here.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Compare two evaluations of the same problems: a paired test by problem, and the problems that were won
    and lost.

    Both must have the same problems (data source and task id); attempts without a score are left out
    (docs/evaluation.md).
    """
    if run_a.exists() and run_b.exists() and run_a.samefile(run_b):
        typer.echo(f"note: both are {run_a}, which is compared with itself", err=True)
    from rich.console import Console

    from agentrl.extras.research.compare import compare as compare_attempts
    from agentrl.figures.attempts import read_attempts

    comparison = compare_attempts(read_attempts(run_a), read_attempts(run_b), only_common=common)
    show(comparison, Console())
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "comparison.json").write_text(
            json.dumps({"a": str(run_a), "b": str(run_b), **comparison.to_json()}, indent=1), encoding="utf-8"
        )
        (out / "comparison.md").write_text(markdown(comparison, str(run_a), str(run_b)), encoding="utf-8")
        typer.echo(f"wrote comparison.json and comparison.md to {out}")


def show(comparison: Comparison, console: Console) -> None:
    """Print the comparison, with the problems won and lost by the largest differences."""
    console.print(_table(COLUMNS, [_cells(found) for found in _rows(comparison)]))
    for title, pairs in (("won", comparison.won), ("lost", comparison.lost)):
        if pairs:
            shown = [_pair_cells(pair) for pair in pairs[:MAX_SHOWN]]
            console.print(_table(PROBLEM_COLUMNS, shown, title=f"{title}: {len(shown)} of {len(pairs)}"))
    for line in (*comparison.notes, verdict(comparison.overall)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def verdict(found: Difference) -> str:
    """Return one sentence with the difference of B and A and its significance."""
    kind = "exact sign-flip test" if found.is_exact else "sign-flip test, sampled"
    sure = "significant difference" if found.p_value < 0.05 else "no significant difference"
    return (
        f"B - A = {_signed(found.difference.value)} {_interval(found.difference)}, p = {_p(found.p_value)} "
        f"({kind}): {sure}"
    )


def markdown(comparison: Comparison, name_a: str, name_b: str) -> str:
    """Return the comparison as a Markdown page, with all problems won and lost."""
    lines = [
        f"# {name_b} against {name_a}",
        "",
        f"A: `{name_a}`, B: `{name_b}`.",
        "",
        verdict(comparison.overall) + ".",
        "",
    ]
    lines += _markdown_table(COLUMNS, [_cells(found) for found in _rows(comparison)])
    for title, pairs in (("Won", comparison.won), ("Lost", comparison.lost)):
        if pairs:
            lines += ["", f"## {title}: {len(pairs)}", ""]
            lines += _markdown_table(PROBLEM_COLUMNS, [_pair_cells(pair) for pair in pairs])
    lines += ["", *(f"- {note}" for note in comparison.notes)]
    return "\n".join(lines).rstrip() + "\n"


def _rows(comparison: Comparison) -> Sequence[Difference]:
    """Return the sources, and the overall result if there are several."""
    return (*comparison.sources, comparison.overall) if len(comparison.sources) > 1 else comparison.sources


def _cells(found: Difference) -> tuple[str, ...]:
    counts = (str(found.num_won), str(found.num_lost), str(found.num_problems))
    accuracies = (
        f"{found.accuracy_a.value:.3f}",
        f"{found.accuracy_b.value:.3f}",
        _signed(found.difference.value),
    )
    return found.name, *accuracies, _interval(found.difference), _p(found.p_value), *counts


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> Table:
    """Return a table that fits into 80 columns. Names are folded; numbers are never cut."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for name in header:
        is_name = name in PROBLEM_COLUMNS[:2]
        table.add_column(name, overflow="fold", no_wrap=not is_name, justify="left" if is_name else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _pair_cells(pair: ProblemPair) -> tuple[str, ...]:
    return (
        pair.source,
        pair.problem,
        f"{pair.accuracy_a:.3f} of {pair.num_a}",
        f"{pair.accuracy_b:.3f} of {pair.num_b}",
    )


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *escaped)]


def _signed(value: float) -> str:
    return f"{value:+.3f}"


def _interval(estimate: Estimate) -> str:
    assert estimate.low is not None, "differences always have limits"
    assert estimate.high is not None, "differences always have limits"
    return f"[{_signed(estimate.low)}, {_signed(estimate.high)}]"


def _p(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else f"{value:.1e}"
