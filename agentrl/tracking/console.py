"""Consoles of a run: a live panel on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TextIO

from agentrl.terminal_text import visible
from agentrl.tracking.attempts import troubles_text
from agentrl.tracking.closing_table import ClosingTable
from agentrl.tracking.compute import MFU
from agentrl.tracking.live_console import LiveConsole
from agentrl.tracking.metrics import StepRecord
from agentrl.tracking.progress import Progress, duration
from agentrl.tracking.terminal import is_terminal


class Console(Protocol):
    """Shows messages and progress of a run."""

    def say(self, text: str) -> None:
        """Show one line: a start-up message, a restart, a warning."""

    def log(self, record: StepRecord) -> None:
        """Show the metrics of a step or a validation."""

    def restore(self, records: Sequence[StepRecord]) -> None:
        """Take the records of earlier processes of the run, which have shown them."""

    def set_total_steps(self, total_steps: int) -> None:
        """Set the length of the run, once the data are known."""

    def set_phase(self, phase: str | None) -> None:
        """Show the current phase; None: between phases."""

    def set_servers(self, states: Mapping[str, str]) -> None:
        """Show the inference servers: name or URL -> starting, ready, needs_weights or failed."""

    def show_closing(self, table: ClosingTable) -> None:
        """Show the closing table at the end of the run."""

    def close(self) -> None:
        """Release the terminal. Idempotent."""


def open_console(
    total_steps: int | None,
    *,
    title: str = "agentrl",
    look: str | None = None,
    log_file: Path | None = None,
    stream: TextIO | None = None,
) -> Console:
    """Return a live console if standard output is a terminal, else a plain one.

    Args:
        look: command that opens the run's page, which a live console shows.
        log_file: a live console redirects the output of this process and its children to this file; None: it
            does not redirect.
        stream: write plain lines to it, whatever standard output is.
    """
    if stream is None and is_terminal(sys.stdout):
        return LiveConsole(total_steps, title=title, look=look, log_file=log_file)
    return PlainConsole(total_steps, stream=stream)


class QuietConsole:
    """Shows nothing: for runs without `console` among the trackers."""

    def say(self, text: str) -> None:
        pass

    def log(self, record: StepRecord) -> None:
        pass

    def restore(self, records: Sequence[StepRecord]) -> None:
        pass

    def set_total_steps(self, total_steps: int) -> None:
        pass

    def set_phase(self, phase: str | None) -> None:
        pass

    def set_servers(self, states: Mapping[str, str]) -> None:
        pass

    def show_closing(self, table: ClosingTable) -> None:
        pass

    def close(self) -> None:
        pass


class PlainConsole:
    """Writes aligned plain lines, for files, pipes and CI."""

    def __init__(self, total_steps: int | None, *, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._progress = Progress(total_steps)
        self._servers: dict[str, str] = {}

    def say(self, text: str) -> None:
        with suppress(OSError):  # a full disk or a closed pipe is no reason to end a run
            # One write per line, newline included, so that other processes' lines never split ours.
            self._stream.write(visible(text) + "\n")
            self._stream.flush()

    def log(self, record: StepRecord) -> None:
        self._progress.add(record)
        self.say(
            f"validation at step {record.step}: {validation_text(record.values)}"
            if record.kind == "validation"
            else step_line(record, self._progress)
        )

    def restore(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            self._progress.add(record)

    def set_total_steps(self, total_steps: int) -> None:
        self._progress.total_steps = total_steps

    def set_phase(self, phase: str | None) -> None:
        pass  # a line per phase would drown the lines per step

    def set_servers(self, states: Mapping[str, str]) -> None:
        for name, state in states.items():
            if self._servers.get(name) != state:
                self.say(f"server {name}: {state}")
        self._servers = dict(states)

    def show_closing(self, table: ClosingTable) -> None:
        self.say("\n".join(["", *([table.to_text(), ""] if table.rows else []), *table.notes]))

    def close(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def step_line(record: StepRecord, progress: Progress) -> str:
    """Return the line of a training step. Missing values are dashes, so that columns stay aligned."""

    def number(name: str, form: str) -> str:
        return format(record.values[name], form) if name in record.values else "-"

    total = progress.total_steps
    step = f"{record.step:>5}" if total is None else f"{record.step:>{len(str(total))}}/{total}"
    cells = (
        f"step {step}",
        f"reward {number('rollout/reward_mean', '.3f'):>6}",
        f"accuracy {number('rollout/accuracy', '.3f'):>5}",
        f"tool use {number('rollout/tool_use', '.2f'):>4}",
        f"lag {number('rollout/lag/mean', '.2f'):>4} max {number('rollout/lag/max', '.0f'):>2}",
        f"tokens/s {number('speed/sampled_tokens_per_s', '.0f'):>6}",
        *([f"MFU {number(MFU, '.2f')}"] if MFU in record.values else []),
        f"took {number('time/step_s', '.1f'):>5} s",
        f"eta {duration(progress.eta_s()):>7}",
    )
    return "  ".join([*cells, *([troubles] if (troubles := troubles_text(record.values)) else [])])


def validation_text(values: Mapping[str, float]) -> str:
    """Return accuracy (also by agent), tool use where needed, reward and failures as text."""
    if "val/accuracy" not in values:
        return "no attempt could be scored"
    prefix = "val/accuracy/"
    agents = ", ".join(
        f"{name.removeprefix(prefix)} {value:.3f}"
        for name, value in sorted(values.items())
        if name.startswith(prefix)
    )
    text = f"accuracy {values['val/accuracy']:.3f}" + (f" ({agents})" if agents else "")
    if "val/tool_use/needs_tool" in values:
        text += f", tool use where needed {values['val/tool_use/needs_tool']:.2f}"
    if "val/reward_mean" in values:
        text += f", reward {values['val/reward_mean']:.3f}"
    if values.get("val/failed"):
        text += (
            f"; {values['val/failed']:.0f} of {values['val/trajectories']:.0f} attempts could not be scored"
        )
    return text
