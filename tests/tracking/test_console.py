"""What a person sees: plain lines, the live panel on a real pseudo-terminal, the closing table."""

from __future__ import annotations

import fcntl
import io
import itertools
import os
import pty
import re
import struct
import sys
import termios
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console as RichConsole

from agentrl.tracking.closing_table import ClosingRow, ClosingTable, closing_rows, write_summary
from agentrl.tracking.console import PlainConsole, QuietConsole, open_console
from agentrl.tracking.metrics import StepRecord
from agentrl.tracking.panel import PanelState, draw_panel, phase_seconds, sparkline
from agentrl.tracking.progress import WINDOW_STEPS, Progress, duration

FULL = {
    "rollout/reward_mean": 0.5,
    "rollout/accuracy": 0.25,
    "rollout/accuracy/tool_agent": 0.125,
    "rollout/tool_use": 0.75,
    "rollout/lag/mean": 0.5,
    "rollout/lag/max": 1.0,
    "speed/sampled_tokens_per_s": 3210.0,
    "time/take_s": 1.0,
    "time/update_s": 3.0,
    "time/credit_s": 0.001,
    "time/step_s": 4.25,
}
VALIDATION = {
    "val/accuracy": 0.875,
    "val/accuracy/tool_agent": 0.75,
    "val/tool_use/needs_tool": 0.5,
    "val/reward_mean": 0.25,
}


def train(step: int, wall_s: float, values: dict[str, float] = FULL) -> StepRecord:
    return StepRecord("train", step, step, wall_s, values)


# --------------------------------------------------------------------------------------------------- progress


@given(st.floats(0.1, 100), st.integers(2, 3 * WINDOW_STEPS), st.integers(0, 500), st.integers(0, 50))
def test_at_an_even_pace_the_eta_is_steps_left_times_the_pace(pace, num_steps, steps_left, resumed_at):
    progress = Progress(resumed_at + num_steps + steps_left)
    for step in range(1, num_steps + 1):
        progress.add(train(resumed_at + step, 1000.0 + step * pace))
    assert progress.eta_s() == pytest.approx(steps_left * pace)


def test_nobody_knows_the_eta_before_two_steps_or_without_an_end():
    endless, fresh = Progress(None), Progress(10)
    for step in (1, 2):
        endless.add(train(step, step))
    fresh.add(train(1, 5.0))
    assert endless.eta_s() is None
    assert fresh.eta_s() is None
    assert [duration(s) for s in (None, 0, 59.6, 3599, 3600, 36061)] == [
        "-",
        "0:00",
        "1:00",
        "59:59",
        "1:00:00",
        "10:01:01",
    ]


# ------------------------------------------------------------------------------------------------ plain lines


def test_plain_lines_say_everything_and_stand_in_columns():
    stream = io.StringIO()
    console = PlainConsole(100, stream=stream)
    console.log(StepRecord("validation", 0, 0, 1.0, VALIDATION))
    console.log(train(1, 10.0))
    console.log(train(2, 14.0, {"rollout/reward_mean": -0.125}))
    validation, first, second = stream.getvalue().splitlines()
    assert (
        validation
        == "validation at step 0: accuracy 0.875 (tool_agent 0.750), tool use where needed 0.50, reward 0.250"
    )
    assert re.split(r"\s{2,}|(?<=[a-z]) +", first)[:4] == ["step", "1/100", "reward", "0.500"]
    assert "accuracy 0.250" in first
    assert "lag 0.50 max  1" in first
    assert "tokens/s   3210" in first
    assert second.endswith("eta    6:32")
    labels = ("step", "reward", "accuracy", "tool use", "lag", "max", "tokens/s", "took", "eta")
    assert [first.index(label) for label in labels] == [second.index(label) for label in labels]


def test_plain_console_tells_each_change_of_a_server_once():
    stream = io.StringIO()
    console = PlainConsole(None, stream=stream)
    console.set_servers({"a": "starting", "b": "ready"})
    console.set_servers({"a": "ready", "b": "ready"})
    assert stream.getvalue().splitlines() == ["server a: starting", "server b: ready", "server a: ready"]


def test_a_pipe_gets_a_plain_console_and_no_terminal_codes(capsys):
    console = open_console(3)
    assert isinstance(console, PlainConsole)
    console.log(train(1, 1.0))
    console.show_closing(ClosingTable([ClosingRow.from_values("trained", VALIDATION)]))
    console.close()
    assert "\x1b" not in capsys.readouterr().out


def test_a_quiet_console_is_quiet(capfd):
    console = QuietConsole()
    console.say("x")
    console.log(train(1, 1.0))
    console.set_phase("take")
    console.set_servers({"a": "ready"})
    console.show_closing(ClosingTable([ClosingRow("trained")]))
    console.close()
    assert capfd.readouterr() == ("", "")


# ------------------------------------------------------------------------------------------------- live panel


def drawn(state: PanelState, *, width: int, since_log_s: float = 0.0) -> str:
    console = RichConsole(file=io.StringIO(), width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(draw_panel(state, since_log_s=since_log_s))
    return capture.get()


def test_the_panel_shows_the_numbers_that_matter():
    state = PanelState("quickstart", 100, phase="update", servers={"a": "ready", "b": "needs_weights"})
    for record in (StepRecord("validation", 0, 0, 0.0, VALIDATION), train(1, 10.0), train(2, 14.0)):
        state.add(record)
    text = drawn(state, width=110, since_log_s=2.0)
    for part in (
        "step 2/100",
        "updating  eta 6:30",
        "0.500",
        "3,210 tokens/s",
        "4.2 s per step",
        "max 1",
        "tool 0.12",
    ):
        assert part in text
    for part in ("take 1.00 s", "update 3.00 s", "0.875", "at step 0", "1 ready  1 needs weights", "0:16"):
        assert part in text
    assert phase_seconds(FULL) == {"take": 1.0, "update": 3.0}


@given(st.integers(20, 200), st.booleans())
def test_the_panel_fits_any_width(width, has_records):
    state = PanelState(
        "a title that is longer than a narrow window",
        100 if has_records else None,
        "agentrl view runs/a_long_name/of_a_run" if has_records else None,
        servers={"a": "failed"},
    )
    if has_records:
        state.add(train(1, 10.0))
        state.add(StepRecord("validation", 1, 1, 11.0, VALIDATION))
    lines = drawn(state, width=width).rstrip("\n").splitlines()
    assert {RichConsole().render_str(line).cell_len for line in lines} == {width}


@given(st.lists(st.floats(-1e6, 1e6), max_size=30))
def test_a_sparkline_has_one_block_per_value_in_the_order_of_the_values(values):
    blocks = sparkline(values)
    assert len(blocks) == len(values)
    order = sorted(range(len(values)), key=values.__getitem__)
    assert all(blocks[a] <= blocks[b] for a, b in itertools.pairwise(order))


PROGRAM = """
    import os, subprocess, sys
    from pathlib import Path
    from agentrl.tracking.closing_table import ClosingRow, ClosingTable
    from agentrl.tracking.console import open_console
    from agentrl.tracking.metrics import StepRecord

    console = open_console(2, title="on a terminal", look="agentrl view RUN", log_file=Path(sys.argv[1]))
    console.say("server ready in 6.1 s")
    console.log(StepRecord("train", 1, 1, 1.0, {"rollout/reward_mean": 0.5}))
    print("printed by python")
    subprocess.run(["sh", "-c", "echo printed by a child; printf '10%%\\\\r100%% loaded\\\\n' >&2"], check=True)
    print(*(f"line {i}" for i in range(500)), sep="\\n")
    console.log(StepRecord("train", 2, 2, 2.0, {"rollout/reward_mean": 0.75}))
    if len(sys.argv) > 2:
        raise SystemExit("died without a close")
    console.show_closing(ClosingTable([ClosingRow("trained", accuracy=0.9)]))
    console.close()
    print("the terminal is back")
"""  # noqa: E501


def run_on_a_terminal(*arguments: str) -> str:
    """Run PROGRAM on a pseudo-terminal of 100 x 40 and return what was written to it, without colours."""
    child, terminal = pty.fork()
    if child == 0:
        environment = {**os.environ, "TERM": "xterm-256color"}
        os.execve(sys.executable, [sys.executable, "-c", textwrap.dedent(PROGRAM), *arguments], environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    written = b""
    while True:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:  # Linux: the last writer has closed the terminal
            break
        if not chunk:
            break
        written += chunk
    os.close(terminal)
    os.waitpid(child, 0)
    return re.sub(r"\x1b\[[0-9;]*m", "", written.decode()).replace("\r\n", "\n")


def test_on_a_terminal_foreign_output_scrolls_by_above_the_panel(tmp_path):
    log = tmp_path / "console.log"
    written = run_on_a_terminal(str(log))
    for part in (
        "server ready in 6.1 s",
        "printed by python",
        "printed by a child",
        "100% loaded",
        "step 2/2",
        "on a terminal",
        "agentrl view RUN",
    ):
        assert part in written
    assert "10%\r" not in written
    assert re.search(r"\.\.\. \d+ more lines in console\.log", written)
    assert written.rstrip().endswith("the terminal is back")
    assert written.rindex("trained") > written.rindex("╰")
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l"), "the cursor must be visible again"
    kept = log.read_text().splitlines()
    assert [line for line in kept if line.startswith("line ")] == [f"line {i}" for i in range(500)]
    assert "printed by a child" in kept
    assert "the terminal is back" not in kept


def test_a_run_that_dies_gives_the_terminal_back_and_its_last_words_are_kept(tmp_path):
    written = run_on_a_terminal(str(tmp_path / "console.log"), "die")
    assert "died without a close" in written
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")


# ---------------------------------------------------------------------------------------------- closing table


def test_the_closing_table_in_its_three_forms(tmp_path):
    warm = ClosingRow("warm-started", accuracy=0.5, accuracy_by_agent={"tool_agent": 0.25})
    table = ClosingTable(
        [warm, ClosingRow.from_values("trained", {**VALIDATION, "val/response_tokens/mean": 61.04})],
        notes=["2 steps"],
    )
    assert table.header() == (
        "policy",
        "accuracy",
        "tool_agent",
        "tool use where needed",
        "reward",
        "tokens per answer",
    )
    assert table.cells() == [
        ("warm-started", "0.500", "0.250", "-", "-", "-"),
        ("trained", "0.875", "0.750", "0.50", "0.250", "61.0"),
    ]
    assert len({len(line) for line in table.to_text().splitlines()}) == 1
    path: Path = tmp_path / "summary.md"
    write_summary(table, path, title="quickstart")
    assert path.read_text().splitlines() == [
        "# quickstart",
        "",
        "| policy | accuracy | tool_agent | tool use where needed | reward | tokens per answer |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| warm-started | 0.500 | 0.250 | - | - | - |",
        "| trained | 0.875 | 0.750 | 0.50 | 0.250 | 61.0 |",
        "",
        "- 2 steps",
    ]
    console = RichConsole(file=io.StringIO(), width=100)
    with console.capture() as capture:
        console.print(table.to_rich())
    assert "0.875" in capture.get()


def test_final_is_the_policy_that_was_trained_last_or_says_which_step_it_is_of():
    results = {
        "warm": VALIDATION,
        "initial": {**VALIDATION, "val/step": 0},
        "final": {**VALIDATION, "val/step": 20},
    }
    assert [row.policy for row in closing_rows(results, step=20)] == ["warm", "initial", "final"]
    assert [row.policy for row in closing_rows(results, step=25)] == ["warm", "initial", "step 20"]


def test_validation_rows_without_a_score_are_told_beside_the_accuracy():
    values = {**VALIDATION, "val/failed": 5.0, "val/trajectories": 9.0}
    out = io.StringIO()
    PlainConsole(9, stream=out).log(StepRecord("validation", 3, 3, 1.0, values))
    assert out.getvalue().endswith("; 5 of 9 attempts could not be scored\n")
    table = ClosingTable(
        [ClosingRow("baseline", accuracy=0.5, num_attempts=9), ClosingRow.from_values("trained", values)]
    )
    assert table.header()[:3] == ("policy", "accuracy", "not scored")
    assert [cells[:4] for cells in table.cells()] == [
        ("baseline", "0.500", "0 of 9", "-"),
        ("trained", "0.875", "5 of 9", "0.750"),
    ]
    state = PanelState("run", 9)
    state.add(StepRecord("validation", 3, 3, 1.0, values))
    state.add(train(4, 2.0, {**FULL, "attempts/failed": 3.0, "rollout/dropped_groups": 1.0}))
    shown = io.StringIO()
    RichConsole(file=shown, width=120).print(draw_panel(state, since_log_s=0.0))
    assert "5 of 9 not scored" in shown.getvalue()
    assert "3 failed  1 groups dropped" in shown.getvalue()


def test_a_run_without_validations_has_no_table(tmp_path):
    write_summary(ClosingTable([], notes=["2 steps"]), tmp_path / "summary.md", title="run")
    assert (tmp_path / "summary.md").read_text() == "# run\n\nNo validation was made.\n\n- 2 steps\n"
