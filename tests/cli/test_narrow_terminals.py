"""The live panel in a terminal that is narrow, or becomes so."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
from collections.abc import Iterator

import pytest
from rich.console import Console
from rich.text import Text

from agentrl.tracking.live_console import ResizedLive
from agentrl.tracking.metrics import StepRecord
from agentrl.tracking.panel import PanelState, draw_panel
from agentrl.tracking.terminal import TerminalConsole

VALUES = {
    "rollout/reward_mean": 0.5,
    "rollout/accuracy": 0.5,
    "rollout/accuracy/single_turn_agent": 0.125,
    "rollout/accuracy/interaction_agent": 0.25,
    "rollout/accuracy/tool_agent": 0.875,
    "rollout/tool_use": 0.5,
    "time/take_s": 0.25,
    "time/update_s": 0.5,
    "time/publish_s": 0.125,
    "time/score_s": 0.75,
}


def state() -> PanelState:
    made = PanelState("a run with quite a long name, as folders of runs have", 40)
    for step in range(1, 30):
        made.add(StepRecord("train", step, step, float(step), VALUES))
    return made


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_panel_fits_and_nothing_is_cut_off(width: int) -> None:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 - closed with the process
    console.print(draw_panel(state(), since_log_s=1.0))
    text = console.export_text()
    assert all(len(line) <= width for line in text.splitlines())
    words = text.split()
    for word in (
        "single_turn",
        "0.12",
        "interaction",
        "0.25",
        "tool",
        "0.88",
        "take",
        "update",
        "publish",
        "score",
        "29/40",
    ):
        assert word in words, text


@pytest.fixture
def terminal() -> Iterator[tuple[int, TerminalConsole]]:
    """Yield the reader's end of a pseudo-terminal of 120 columns, and a console on the other end."""
    reader, writer = pty.openpty()
    resize(reader, 120)
    with os.fdopen(writer, "w") as file:
        yield reader, TerminalConsole(file=file, force_terminal=True, _environ={"TERM": "xterm-256color"})
    os.close(reader)


def resize(descriptor: int, columns: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))


def written(reader: int, console: TerminalConsole) -> str:
    console.file.flush()
    text = b""
    while select.select([reader], [], [], 0.2)[0]:  # a pseudo-terminal hands out its 4 KiB at a time
        text += os.read(reader, 65536)
    return re.sub(r"\x1b\[[0-9;]*m|\r", "", text.decode())


CLEARED = "\x1b[2J\x1b[H"


def test_a_terminal_that_becomes_narrower_is_cleared_and_shows_again_what_was_said(
    terminal: tuple[int, TerminalConsole],
) -> None:
    reader, console = terminal
    live = ResizedLive(
        recent=[Text("said before")],
        console=console,
        get_renderable=lambda: draw_panel(state(), since_log_s=1.0),
        redirects=False,
    )
    live.auto_refresh = False  # before it starts: its thread would never be stopped
    with live:
        live.refresh()
        assert CLEARED not in written(reader, console)
        resize(reader, 60)
        live.refresh()
        said, _, shown = written(reader, console).partition(CLEARED)[2].partition("╭")
        assert said.strip() == "said before"
        assert {len(line) for line in f"╭{shown.partition('╯')[0]}╯".splitlines()} == {60}
        live.refresh()
        resize(reader, 120)
        live.refresh()
        assert CLEARED not in written(reader, console)  # the panel's first line is where it was
