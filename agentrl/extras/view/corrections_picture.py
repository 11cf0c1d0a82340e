"""`corrections.png`: share kept, effective sample size, gradient norm and cosine of each correction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from agentrl.extras.view.run_picture import STYLE, save_picture

_PANELS = {
    "kept": "share of action tokens kept",
    "ess": "effective sample size (share)",
    "grad_norm": "gradient norm",
    "cosine": "cosine to the on-policy gradient",
}


def draw(
    lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Mapping[str, float | None]], path: Path
) -> None:
    """Draw one panel per column: a bar for the mean over steps, a dot for every step.

    Raises:
        InfrastructureError: the picture cannot be written.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(16, 1.6 + 0.42 * len(summary)))
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, len(_PANELS), sharey=True)
        for axes, (column, title) in zip(panels, _PANELS.items(), strict=True):
            _draw_panel(axes, lines, summary, column)
            axes.set_title(title)
        figure.tight_layout()
        save_picture(figure, path)


def _draw_panel(
    axes: Axes,
    lines: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Mapping[str, float | None]],
    column: str,
) -> None:
    names = list(summary)[::-1]  # the first of the table on top
    axes.barh(names, [summary[name][column] or 0.0 for name in names], color="#93c5fd", height=0.62)
    points = [(line[column], names.index(line["correction"])) for line in lines if line[column] is not None]
    axes.scatter([x for x, _ in points], [y for _, y in points], s=9, color="#1e3a8a", alpha=0.5, zorder=3)
