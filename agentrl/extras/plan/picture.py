"""The picture of a simulation or a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from agentrl.extras.plan.measure import Simulated
from agentrl.extras.view.run_picture import STYLE, save_picture

_COLORS = ("#2563eb", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#94a3b8")
_WAITS = "#e2e8f0"
_PERCENT = 100.0


def draw(found: Mapping[str, Simulated], path: Path, *, title: str, label: str) -> None:
    """Draw simulations side by side, by name, into `path`. `label`: what the names are values of.

    Raises:
        InfrastructureError: the picture cannot be written.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 3.9))
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, 4)
        figure.subplots_adjust(left=0.05, right=0.99, top=0.76, bottom=0.15, wspace=0.3)
        steps = {name: own.phases for name, own in found.items()}
        _stack(axes[0], steps, "Step, seconds", waits="take")
        servers = {name: _percent(own.servers) for name, own in found.items()}
        _stack(axes[1], servers, "Servers, % of their time", waits="idle")
        lags = {name: _percent(own.lags) for name, own in found.items()}
        _stack(axes[2], lags, "Lag of trained tokens, %", waits="")
        axes[3].bar(list(found), [own.tokens_per_s for own in found.values()], color=_COLORS[0])
        axes[3].set_title("Sampled tokens per second")
        for axis in axes:
            axis.set_xlabel(label)
            axis.grid(axis="x", visible=False)
            if len(found) > 6:
                axis.tick_params(axis="x", labelrotation=60)
        figure.text(0.05, 0.93, title, fontsize=14, fontweight="bold", color="#0f172a")
        save_picture(figure, path)


def _percent(shares: Mapping[str, float] | Mapping[int, float]) -> dict[str, float]:
    return {str(name): _PERCENT * max(0.0, share) for name, share in shares.items()}


def _stack(axis: Axes, found: Mapping[str, Mapping[str, float]], title: str, *, waits: str) -> None:
    """Draw one stacked bar per simulation; what waits is grey."""
    parts = list(dict.fromkeys(part for own in found.values() for part in own))
    parts = [part for part in parts if any(own.get(part, 0.0) > 0 for own in found.values())]
    bottom = [0.0] * len(found)
    for index, part in enumerate(parts):
        heights = [own.get(part, 0.0) for own in found.values()]
        color = _WAITS if part == waits else _COLORS[index % len(_COLORS)]
        axis.bar(list(found), heights, bottom=bottom, color=color, label=part)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    axis.set_title(title, pad=22)
    axis.legend(
        loc="lower left",
        bbox_to_anchor=(-0.02, 0.98),
        ncols=min(5, len(parts)),
        columnspacing=0.6,
        handlelength=1.0,
        handletextpad=0.3,
    )
