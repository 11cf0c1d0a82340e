"""Plots of an evaluation: accuracy by source, pass@k, lengths of attempts, accuracy by difficulty."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from agentrl.extras.view.run_panels import CYCLE, GREY, INK
from agentrl.extras.view.run_picture import STYLE, save_picture
from agentrl.figures.attempts import EvaluatedAttempt
from agentrl.figures.summary import Estimate, EstimateAt, EvalSummary, SourceSummary

MAX_NAME_CHARS = 28
NUM_BINS = 30
NUM_LINES = len(CYCLE) - 1
"""Number of sources with their own colour; all others are grey."""

Panel = Callable[[Axes], None]


def draw_picture(
    summary: EvalSummary, attempts: Sequence[EvaluatedAttempt], path: Path, *, title: str
) -> None:
    """Draw all available plots into one picture.

    Raises:
        InfrastructureError: the file cannot be written.
    """
    panels: list[Panel] = [lambda axes: _draw_accuracy(axes, summary)]
    if any(len(source.pass_at) > 1 for source in summary.sources):
        panels.append(lambda axes: _draw_pass_at(axes, summary))
    panels.append(lambda axes: _draw_tokens(axes, summary, attempts))
    if any(source.by_difficulty for source in summary.sources):
        panels.append(lambda axes: _draw_difficulties(axes, summary))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6 * len(panels), 4.6))
        FigureCanvasAgg(figure)
        for draw, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
            draw(axes)
        figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold", color=INK)
        figure.tight_layout()
        save_picture(figure, path)


def _draw_accuracy(axes: Axes, summary: EvalSummary) -> None:
    """Draw one bar per source, with its interval and value."""
    axes.set_title("Accuracy (mean@n), 95 % interval")
    _bars(
        axes, [(source.name, source.accuracy, _color(place)) for place, source in enumerate(summary.sources)]
    )


def _draw_difficulties(axes: Axes, summary: EvalSummary) -> None:
    axes.set_title("Accuracy by difficulty")
    several = sum(bool(source.by_difficulty) for source in summary.sources) > 1
    rows = []
    for place, source in enumerate(summary.sources):
        rows += [
            (f"{source.name}: {p.name}" if several else p.name, p.accuracy, _color(place))
            for p in source.by_difficulty
        ]
    _bars(axes, rows)


def _bars(axes: Axes, rows: Sequence[tuple[str, Estimate | None, str]]) -> None:
    """Draw the bars from top to bottom; a missing value has no bar."""
    places = np.arange(len(rows))[::-1]
    for place, (_, estimate, color) in zip(places, rows, strict=True):
        if estimate is None:
            axes.text(0.01, place, "not measured", va="center", color=GREY)
            continue
        axes.barh(place, estimate.value, color=color, height=0.62, alpha=0.55)
        right = estimate.value
        if estimate.low is not None and estimate.high is not None:
            axes.plot(
                [estimate.low, estimate.high],
                [place, place],
                color=INK,
                linewidth=1.6,
                marker="|",
                markersize=9,
            )
            right = estimate.high
        axes.annotate(
            f"{100 * estimate.value:.1f} %",
            (right, place),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.set_yticks(places, [_short(name) for name, _, _ in rows])
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set_xlim(0, 1.18)  # leaves room for the label beside a full bar
    axes.set_xticks(np.linspace(0, 1, 6))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(visible=False, axis="y")


def _draw_pass_at(axes: Axes, summary: EvalSummary) -> None:
    """Draw pass@k of each source with its interval as a band, and maj@k as a dashed line."""
    axes.set_title("pass@k (solid) and maj@k (dashed)")
    for place, source in enumerate(summary.sources):
        _curve(axes, source.pass_at, _color(place), label=_short(source.name))
        if source.majority_at:
            ks, values = [at.k for at in source.majority_at], [at.estimate.value for at in source.majority_at]
            axes.plot(ks, values, color=_color(place), linewidth=1.4, linestyle="--")
    most = max(source.n for source in summary.sources)
    if most > 8:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("k")
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(loc="best")


def _curve(axes: Axes, figures: Sequence[EstimateAt], color: str, *, label: str) -> None:
    ks = [at.k for at in figures]
    axes.plot(
        ks,
        [at.estimate.value for at in figures],
        color=color,
        linewidth=2,
        marker="o",
        markersize=3.5,
        label=label,
    )
    known = [at for at in figures if at.estimate.low is not None and at.estimate.high is not None]
    lows, highs = [at.estimate.low for at in known], [at.estimate.high for at in known]
    axes.fill_between(
        [at.k for at in known],
        np.array(lows, float),
        np.array(highs, float),
        color=color,
        alpha=0.14,
        linewidth=0,
    )


def _draw_tokens(axes: Axes, summary: EvalSummary, attempts: Sequence[EvaluatedAttempt]) -> None:
    """Draw histograms of tokens per attempt, with the same bins for all sources."""
    axes.set_title("Tokens per attempt")
    counts = {source.name: _lengths(source, attempts) for source in summary.sources}
    longest = max((max(lengths) for lengths in counts.values() if lengths), default=0)
    if not longest:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color=GREY)
        return
    edges: list[float] = np.linspace(0, longest + 1, min(NUM_BINS, longest + 1) + 1).tolist()
    for place, (name, lengths) in enumerate(counts.items()):
        axes.hist(lengths, bins=edges, alpha=0.35, histtype="stepfilled", linewidth=0, color=_color(place))
        axes.hist(
            lengths, bins=edges, histtype="step", linewidth=1.5, color=_color(place), label=_short(name)
        )
    axes.set_xlabel("sampled tokens")
    axes.set_ylabel("attempts")
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.legend(loc="best")


def _lengths(source: SourceSummary, attempts: Sequence[EvaluatedAttempt]) -> list[int]:
    return [
        attempt.num_tokens
        for attempt in attempts
        if attempt.source == source.name and attempt.failure is None
    ]


def _color(place: int) -> str:
    return CYCLE[place] if place < NUM_LINES else GREY


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME_CHARS else "…" + name[1 - MAX_NAME_CHARS :]
