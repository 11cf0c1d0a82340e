"""The panels of the report: each function draws one panel into the given axes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from agentrl.extras.view.series import Curve, Series, smooth, windows

INK = "#0f172a"
BLUE, ORANGE, GREEN, PINK, VIOLET, TEAL, AMBER, GREY = (
    "#2563eb",
    "#ea580c",
    "#16a34a",
    "#db2777",
    "#7c3aed",
    "#0891b2",
    "#d97706",
    "#94a3b8",
)
CYCLE = (BLUE, ORANGE, GREEN, VIOLET, PINK, TEAL, AMBER, GREY)
OUTCOME_COLORS = {
    "completed": "#86efac",
    "truncated": "#fcd34d",
    "turn_limit": "#fdba74",
    "timeout": "#f87171",
    "tool_error": "#c084fc",
    "environment_error": "#2dd4bf",
    "model_error": "#60a5fa",
    "reward_error": "#f472b6",
    "aborted": "#475569",
}
SMOOTH_FROM = 12
"""Curves with fewer points are not smoothed."""
MOST_WINDOWS = 60
"""Stacks and bands have one value per window of steps: single steps of a long run are noise."""


def draw_reward(axes: Axes, series: Series) -> None:
    axes.set_title("Training: reward and accuracy")
    reward, accuracy = series.train("rollout/reward_mean"), series.train("rollout/accuracy")
    _noisy(axes, reward, BLUE, "reward")
    # If the reward is correctness, both curves are equal: draw the second only if it differs.
    if len(reward[1]) != len(accuracy[1]) or not np.allclose(reward[1], accuracy[1]):
        _noisy(axes, accuracy, ORANGE, "accuracy")
    _finish(axes)


def draw_validation(axes: Axes, series: Series) -> None:
    axes.set_title("Validation: accuracy by agent")
    for index, agent in enumerate(series.names("validation", "val/accuracy/")):
        steps, values = series.validation(f"val/accuracy/{agent}")
        axes.plot(
            steps,
            values,
            color=CYCLE[index % len(CYCLE)],
            marker="o",
            markersize=3.5,
            linewidth=1.3,
            label=agent,
        )
    steps, values = series.validation("val/accuracy")
    axes.plot(steps, values, color=INK, marker="o", markersize=5, linewidth=2.4, label="all rows")
    for name in (f"val/mean@{rest}" for rest in series.names("validation", "val/mean@") if "/" not in rest):
        steps, low = series.validation(f"{name}/low")
        axes.fill_between(
            steps, low, series.validation(f"{name}/high")[1], color=INK, alpha=0.09, linewidth=0
        )
    _share(axes)
    _finish(axes)


def draw_tool_use(axes: Axes, series: Series) -> None:
    axes.set_title("Attempts that call a tool")
    _noisy(axes, series.train("rollout/tool_use/needs_tool"), GREEN, "rows that need one")
    _noisy(axes, series.train("rollout/tool_use"), GREY, "all rows")
    steps, values = series.validation("val/tool_use/needs_tool")
    if len(values):
        axes.plot(
            steps,
            values,
            color=INK,
            marker="o",
            markersize=5,
            linewidth=1.6,
            linestyle="--",
            label="validation, rows that need one",
        )
    _share(axes)
    _finish(axes)


def draw_wall_clock(axes: Axes, series: Series) -> None:
    axes.set_title("Over elapsed time")
    _noisy(axes, series.train("rollout/reward_mean", over_minutes=True), BLUE, "training reward")
    minutes, values = series.validation("val/accuracy", over_minutes=True)
    if len(values):
        axes.plot(
            minutes, values, color=INK, marker="o", markersize=5, linewidth=2.0, label="validation accuracy"
        )
    _finish(axes, x_label="minutes", integers=False)


def draw_lag(axes: Axes, series: Series, max_staleness: int | None) -> None:
    axes.set_title("Lag of trained tokens")
    steps, largest = series.train("rollout/lag/max")
    _, mean = series.train("rollout/lag/mean")
    if len(steps) == len(mean) > 0:
        places = windows(steps, at_most=MOST_WINDOWS)
        x = [steps[window].mean() for window in places]
        low, middle = ([float(of(mean[window])) for window in places] for of in (np.min, np.mean))
        high = [float(largest[window].max()) for window in places]
        axes.fill_between(x, low, high, color=BLUE, alpha=0.15, linewidth=0, label="range")
        axes.plot(x, middle, color=BLUE, linewidth=1.8, label="mean")
    if max_staleness is not None:
        axes.axhline(
            max_staleness,
            color=PINK,
            linestyle="--",
            linewidth=1.4,
            label=f"bound: max_staleness = {max_staleness}",
        )
    top = max([float(largest.max(initial=0)), float(max_staleness or 0), 1.0])
    axes.set_ylim(0, top * 1.3)
    axes.set_ylabel("versions")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(axes, legend_columns=3)


def draw_time(axes: Sequence[Axes], series: Series) -> None:
    """Two strips: tokens per second, and the seconds of each phase stacked."""
    speed, phases = axes
    speed.set_title("Speed and time per step")
    curve = series.train("speed/sampled_tokens_per_s")
    _noisy(speed, curve, INK, "tokens/s")
    _finish_strip(speed, "tokens/s", INK, is_last=False)
    speed.set_ylim(0, 1.5 * float(curve[1].max(initial=0)) or 1.0)
    _stack_phases(phases, series)
    phases.set_ylabel("seconds")
    _finish(phases, legend_columns=3)


def _stack_phases(axes: Axes, series: Series) -> None:
    names = [
        n
        for n in series.names("train", "time/")
        if n.endswith("_s") and n not in ("step_s", "validate_s", "save_s")
    ]
    steps, seconds = series.stacked([f"time/{name}" for name in names])
    if not seconds.size:
        return
    places = windows(steps, at_most=MOST_WINDOWS)
    steps = np.array([steps[window].mean() for window in places])
    seconds = np.stack([np.median(seconds[:, window], axis=1) for window in places], axis=1)
    order = np.argsort(-seconds.sum(axis=1))
    shown = [int(index) for index in order if seconds[index].sum() > 0.01 * seconds.sum()]
    if not shown:
        return
    labels = [names[index].removesuffix("_s") for index in shown]
    axes.stackplot(
        steps,
        seconds[shown],
        labels=labels,
        colors=[CYCLE[i % len(CYCLE)] for i in range(len(shown))],
        alpha=0.6,
        linewidth=0,
    )
    axes.set_ylim(0, 1.35 * float(seconds[shown].sum(axis=0).max()) or 1.0)  # room for the legend


def draw_learner(axes: Sequence[Axes], series: Series) -> None:
    """Three strips: entropy, KL of the behavior to the proximal policy, gradient norm."""
    axes[0].set_title("Learner")
    strips = (
        ("learner/entropy", "entropy", VIOLET),
        ("learner/correction/kl_k3", "KL (behavior ‖ proximal)", TEAL),
        ("learner/grad_norm", "gradient norm", AMBER),
    )
    for strip, (name, label, color) in zip(axes, strips, strict=True):
        _noisy(strip, series.train(name), color, label)
        _finish_strip(strip, label, color, is_last=strip is axes[-1])


def _finish_strip(axes: Axes, label: str, color: str, *, is_last: bool) -> None:
    """Finish one of several axes in a panel: its label is inside; only the last has step numbers."""
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.margins(y=0.3)
    _finish(axes, x_label="step" if is_last else "", legend=False)
    axes.text(
        0.985,
        0.93,
        label,
        transform=axes.transAxes,
        ha="right",
        va="top",
        color=color,
        fontsize=9,
        fontweight="bold",
    )
    axes.tick_params(labelbottom=is_last)


def draw_outcomes(axes: Axes, series: Series) -> None:
    axes.set_title("Outcomes of all attempts")
    names = [name for name in OUTCOME_COLORS if name in series.names("train", "attempts/")]
    steps, counts = series.stacked([f"attempts/{name}" for name in names])
    if names and counts.any():
        # In some steps no attempt ends.
        places = [window for window in windows(steps, at_most=MOST_WINDOWS) if counts[:, window].any()]
        ended = np.stack([counts[:, window].sum(axis=1) for window in places], axis=1)
        # A rare outcome is invisible in the plot, so the legend has its share of all attempts.
        labels = [
            f"{name} {share:.1%}"
            for name, share in zip(names, counts.sum(axis=1) / max(counts.sum(), 1), strict=True)
        ]
        axes.stackplot(
            [steps[window].mean() for window in places],
            ended / ended.sum(axis=0),
            labels=labels,
            colors=[OUTCOME_COLORS[name] for name in names],
            linewidth=0,
        )
    _share(axes)
    axes.set_ylim(0, 1)
    _finish(axes, legend=False)
    if names:
        axes.legend(
            loc="lower left", ncols=2, frameon=True, facecolor="white", framealpha=0.85, edgecolor="none"
        )


def _noisy(axes: Axes, curve: Curve, color: str, label: str) -> None:
    """Draw the values faintly, with their moving mean on top."""
    x, y = curve
    if not len(y):
        return
    if len(y) < SMOOTH_FROM:
        axes.plot(x, y, color=color, linewidth=1.8, marker="o", markersize=3, label=label)
        return
    axes.plot(x, y, color=color, linewidth=0.9, alpha=0.35)
    axes.plot(x, smooth(y, span=2 * (len(y) // 30 + 1) + 1), color=color, linewidth=2.0, label=label)


def _share(axes: Axes) -> None:
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _finish(
    axes: Axes, *, x_label: str = "step", integers: bool = True, legend: bool = True, legend_columns: int = 1
) -> None:
    axes.set_xlabel(x_label)
    axes.margins(x=0.01)
    if integers:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if not axes.has_data():
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color=GREY)
    elif legend and axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best" if legend_columns == 1 else "upper left", ncols=legend_columns)
