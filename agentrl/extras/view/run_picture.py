"""`report.png`: the curves of a run in one picture, drawn from its `metrics.jsonl` alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from agentrl.errors import CheckpointError, InfrastructureError
from agentrl.extras.view import run_panels as panels
from agentrl.extras.view.series import Series
from agentrl.tracking.metrics import read_metrics
from agentrl.tracking.progress import duration

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture on every machine
    "font.size": 9.5,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.labelcolor": "#475569",
    "axes.edgecolor": "#94a3b8",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e2e8f0",
    "grid.linewidth": 0.8,
    "xtick.color": "#475569",
    "ytick.color": "#475569",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.4,
    "figure.facecolor": "white",
}


def draw_report(run_dir: Path, *, max_staleness: int | None = None, title: str | None = None) -> Path:
    """Draw `run_dir/report.png` and return its path.

    Args:
        max_staleness: drawn as the bound on the lag; None: no line.
        title: None takes the name of the folder.

    Raises:
        CheckpointError: `metrics.jsonl` is missing, damaged or empty.
        InfrastructureError: the picture cannot be written.
    """
    source = run_dir / "metrics.jsonl"
    if not source.is_file():
        raise CheckpointError(f"{source} does not exist; a report needs a run's metrics")
    series = Series(read_metrics(source))
    if not series.num_records:
        raise CheckpointError(f"{source} is empty; a report needs at least one step or validation")
    with matplotlib.rc_context(STYLE):
        figure = draw_figure(series, title or run_dir.resolve().name, max_staleness)
        save_picture(figure, run_dir / "report.png")
    return run_dir / "report.png"


def save_picture(figure: Figure, path: Path) -> None:
    """Save atomically: a reader never sees half a picture of a live run.

    Raises:
        InfrastructureError: the picture cannot be written.
    """
    try:
        partial = path.with_suffix(f".{os.getpid()}.png")
        figure.savefig(partial, dpi=110)
        partial.replace(path)
    except OSError as error:
        raise InfrastructureError(f"cannot write {path}: {error.strerror or error}") from error


def draw_figure(series: Series, title: str, max_staleness: int | None) -> Figure:
    """Draw all panels; `max_staleness` as `draw_report` has it."""
    figure = Figure(figsize=(19, 9.2))
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        2, 4, left=0.045, right=0.985, top=0.865, bottom=0.07, hspace=0.36, wspace=0.22
    )

    def panel(row: int, column: int) -> Axes:
        return figure.add_subplot(grid[row, column])

    def strips(row: int, column: int, heights: tuple[int, ...]) -> list[Axes]:
        inner = grid[row, column].subgridspec(len(heights), 1, hspace=0.14, height_ratios=heights)
        return [figure.add_subplot(inner[index, 0]) for index in range(len(heights))]

    panels.draw_reward(panel(0, 0), series)
    panels.draw_validation(panel(0, 1), series)
    panels.draw_tool_use(panel(0, 2), series)
    panels.draw_wall_clock(panel(0, 3), series)
    panels.draw_lag(panel(1, 0), series, max_staleness)
    panels.draw_time(strips(1, 1, (1, 2)), series)
    panels.draw_learner(strips(1, 2, (1, 1, 1)), series)
    panels.draw_outcomes(panel(1, 3), series)
    figure.text(0.045, 0.945, title, fontsize=17, fontweight="bold", color="#0f172a")
    figure.text(0.045, 0.918, _subtitle(series), fontsize=11, color="#475569")
    return figure


def _subtitle(series: Series) -> str:
    parts = [f"{series.last_step} steps", f"{duration(series.wall_s)} running time"]
    _, accuracy = series.validation("val/accuracy")
    if len(accuracy):
        parts.append(
            f"validation accuracy {accuracy[0]:.3f} → {accuracy[-1]:.3f}"
            if len(accuracy) > 1
            else f"validation accuracy {accuracy[0]:.3f}"
        )
    return "   ·   ".join(parts)
