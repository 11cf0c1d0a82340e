"""Draws the live panel as a pure function of its state."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from agentrl.tracking.attempts import troubles_text
from agentrl.tracking.compute import compute_text
from agentrl.tracking.metrics import StepRecord
from agentrl.tracking.progress import Progress, duration

HISTORY_STEPS = 24
PHASE_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_black")
SERVER_STYLES: Mapping[str, str] = {
    "ready": "green",
    "starting": "yellow",
    "needs_weights": "yellow",
    "failed": "bold red",
}
PHASE_WORDS: Mapping[str, str] = {
    "take": "waiting for a batch",
    "credit": "computing advantages",
    "score": "scoring",
    "update": "updating",
    "publish": "publishing weights",
    "validate": "validating",
    "save": "saving a checkpoint",
    "recover": "restarting the learner",
}


@dataclass
class PanelState:
    """The content of the panel.

    `look`: command that opens the run's page. `phase`: the current phase. `servers`: name or URL -> state.
    """

    title: str
    total_steps: int | None
    look: str | None = None
    phase: str | None = None
    servers: dict[str, str] = field(default_factory=dict)
    train: Mapping[str, float] = field(default_factory=dict)
    validations: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=2))
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY_STEPS))
    accuracies: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY_STEPS))
    progress: Progress = field(init=False)

    def __post_init__(self) -> None:
        self.progress = Progress(self.total_steps)

    def set_total_steps(self, total_steps: int) -> None:
        self.total_steps = self.progress.total_steps = total_steps

    def add(self, record: StepRecord) -> None:
        self.progress.add(record)
        if record.kind == "validation":
            self.validations.append(record)
            return
        self.train = record.values
        for name, history in (("rollout/reward_mean", self.rewards), ("rollout/accuracy", self.accuracies)):
            if math.isfinite(record.values.get(name, math.nan)):
                history.append(record.values[name])


def draw_panel(state: PanelState, *, since_log_s: float) -> Panel:
    """Draw the panel, `since_log_s` seconds after the last record."""
    rows = Table.grid(padding=(0, 2), expand=True)
    rows.add_column(style="dim", no_wrap=True, width=10)
    rows.add_column(ratio=1, overflow="fold")  # wraps in a narrow terminal, instead of cutting off
    for label, content in _rows(state):
        rows.add_row(label, content)
    return Panel(
        Group(_progress_line(state, since_log_s), Text(""), rows),
        title=Text(f" {state.title} ", style="bold"),
        title_align="left",
        subtitle=Text(f" {duration(state.progress.wall_s + since_log_s)} ", style="dim"),
        subtitle_align="right",
        box=box.ROUNDED,
        border_style="dim",
        padding=(0, 1),
    )


def _progress_line(state: PanelState, since_log_s: float) -> Table:
    total = state.total_steps
    eta = state.progress.eta_s()
    line = Table.grid(padding=(0, 2), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True, justify="right")
    left = f"step {state.progress.step}" + ("" if total is None else f"/{total}")
    right = PHASE_WORDS.get(state.phase or "", state.phase or "")
    if eta is not None and state.progress.step < (total or 0):
        right = f"{right}  eta {duration(max(0.0, eta - since_log_s))}".strip()
    bar = (
        ProgressBar(total=total, completed=state.progress.step, complete_style="cyan", finished_style="green")
        if total
        else Text("")
    )
    line.add_row(Text(left, style="bold"), bar, Text(right))
    return line


def _rows(state: PanelState) -> list[tuple[str, Text | PhaseBar]]:
    values = state.train
    rows: list[tuple[str, Text | PhaseBar]] = []
    if values:
        rows += [
            ("reward", _with_history(_number(values, "rollout/reward_mean", 3), state.rewards)),
            (
                "accuracy",
                _with_history(_number(values, "rollout/accuracy", 3), state.accuracies)
                + _by_agent(values, "rollout/accuracy/"),
            ),
            ("tool use", _tool_use(values)),
            (
                "lag",
                Text(
                    f"{_number(values, 'rollout/lag/mean', 2)} versions   max "
                    f"{_number(values, 'rollout/lag/max', 0)}"
                ),
            ),
            (
                "speed",
                Text(
                    f"{_number(values, 'speed/sampled_tokens_per_s', 0)} tokens/s   "
                    f"{_number(values, 'time/step_s', 1)} s per step"
                ),
            ),
        ]
        if computed := compute_text(values):
            rows.append(("updates", Text(computed)))
        if troubles := troubles_text(values):
            rows.append(("trouble", Text(troubles, style="bold red")))
        phases = phase_seconds(values)
        if phases:
            rows += [("time", PhaseBar(phases)), ("", _legend(phases))]
    if state.validations:
        rows += _validation(state.validations)
    if state.servers:
        rows.append(("servers", _servers(state.servers)))
    rows = rows or [("", Text("waiting for the first step", style="dim"))]
    return [*rows, ("page", Text(state.look, style="dim"))] if state.look else rows


def phase_seconds(values: Mapping[str, float]) -> dict[str, float]:
    """Return phase -> seconds of one record, without phases that take less than 0.5 % of the time."""
    found = {
        name.removeprefix("time/").removesuffix("_s"): value
        for name, value in values.items()
        if name.startswith("time/") and name.endswith("_s") and name != "time/step_s" and math.isfinite(value)
    }
    return {phase: seconds for phase, seconds in found.items() if seconds > 0.005 * sum(found.values())}


class PhaseBar:
    """A bar of up to 60 columns, divided by the share of each phase."""

    def __init__(self, phases: Mapping[str, float]) -> None:
        self._phases = phases

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, 60)
        total = sum(self._phases.values())
        done, passed = 0, 0.0
        for index, seconds in enumerate(self._phases.values()):
            passed += seconds
            end = round(width * passed / total)
            yield Segment("━" * (end - done), Style.parse(_color(index)))
            done = end
        yield Segment.line()


def _legend(phases: Mapping[str, float]) -> Text:
    parts = [
        Text.assemble(("━ ", _color(index)), f"{phase} {seconds:.2f} s")
        for index, (phase, seconds) in enumerate(phases.items())
    ]
    return Text("  ").join(parts)


def _color(index: int) -> str:
    return PHASE_COLORS[index % len(PHASE_COLORS)]


def _with_history(number: str, history: Sequence[float]) -> Text:
    return Text.assemble((f"{number:<7}", "bold"), (sparkline(history), "cyan"))


def sparkline(history: Sequence[float]) -> str:
    """Return one block character per value, scaled between the smallest and the largest."""
    blocks = "▁▂▃▄▅▆▇█"
    if not history:
        return ""
    low, high = min(history), max(history)
    span = (high - low) or 1.0
    return "".join(blocks[min(len(blocks) - 1, int((value - low) / span * len(blocks)))] for value in history)


def _by_agent(values: Mapping[str, float], prefix: str) -> Text:
    agents = [
        Text.assemble((f"{name.removeprefix(prefix).removesuffix('_agent')} ", "dim"), f"{value:.2f}")
        for name, value in sorted(values.items())
        if name.startswith(prefix)
    ]
    return Text("   ") + Text("  ").join(agents) if agents else Text("")


def _tool_use(values: Mapping[str, float]) -> Text:
    text = Text(_number(values, "rollout/tool_use", 2), style="bold")
    if "rollout/tool_use/needs_tool" in values:
        text = Text.assemble(
            text, ("   where needed ", "dim"), _number(values, "rollout/tool_use/needs_tool", 2)
        )
    return text


def _validation(validations: Sequence[StepRecord]) -> list[tuple[str, Text | PhaseBar]]:
    last = validations[-1]
    text = Text.assemble(
        (f"{_number(last.values, 'val/accuracy', 3):<7}", "bold green"), (f"at step {last.step}", "dim")
    )
    if len(validations) > 1 and "val/accuracy" in last.values and "val/accuracy" in validations[0].values:
        text.append(f" {last.values['val/accuracy'] - validations[0].values['val/accuracy']:+.3f}")
    if last.values.get("val/failed"):
        text.append(
            f"  {last.values['val/failed']:.0f} of {last.values['val/trajectories']:.0f} not scored",
            style="bold red",
        )
    rows: list[tuple[str, Text | PhaseBar]] = [("validation", text + _by_agent(last.values, "val/accuracy/"))]
    if "val/tool_use/needs_tool" in last.values:
        rows.append(
            (
                "",
                Text.assemble(
                    ("tool use where needed ", "dim"), _number(last.values, "val/tool_use/needs_tool", 2)
                ),
            )
        )
    return rows


def _servers(servers: Mapping[str, str]) -> Text:
    counts = Counter(servers.values())
    return Text("  ").join(
        Text(f"{count} {state.replace('_', ' ')}", style=SERVER_STYLES.get(state, ""))
        for state, count in counts.items()
    )


def _number(values: Mapping[str, float], name: str, digits: int) -> str:
    value = values.get(name, math.nan)
    return f"{value:,.{digits}f}" if math.isfinite(value) else "-"
