"""The application in a terminal: the real one, driven by keys, on small folders of runs."""

from __future__ import annotations

import asyncio
import os
import pty
import random
import select
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from textual.pilot import Pilot
from textual.widgets import DataTable, Input
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.data.trajectories import encode, write_parquet
from agentrl.errors import DataError, UserError
from agentrl.extras.view.sources import open_sources
from agentrl.extras.view.terminal.app import TerminalApp
from agentrl.extras.view.terminal.attempt_screen import AttemptScreen
from agentrl.extras.view.terminal.help_screen import KEYS
from agentrl.extras.view.terminal.lines import MIN_WIDTH, StyledText, harmless, wrap
from agentrl.extras.view.terminal.lines_view import LinesView
from agentrl.extras.view.terminal.list_screen import ListScreen
from agentrl.extras.view.terminal.tokens import COLORINGS, CONTEXT
from agentrl.terminal_text import CONTROL
from agentrl.types import Message, Outcome
from parts.trajectories import make_trajectory
from parts.viewed import Stored, random_trajectory, write_hostile, write_run

Story = Callable[[Pilot[None]], Awaitable[None]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Stored]]:
    folder = tmp_path_factory.mktemp("terminal") / "first"
    return folder, write_run(folder, steps=4, groups=3)


def driven(folders: Iterable[Path], story: Story, *, line: str = "", width: int = 130) -> None:
    """Run the application without a terminal, and do what the story does."""

    async def main() -> None:
        own = TerminalApp(open_sources(list(folders)), tokenizer=None, line=line)
        async with own.run_test(size=(width, 40)) as pilot:
            await until(pilot, lambda: says(pilot, " attempts"))
            await story(pilot)

    asyncio.run(main())


async def until(pilot: Pilot[None], is_so: Callable[[], bool]) -> None:
    """Wait until something is so; the test's own deadline ends it otherwise."""
    await pilot.pause()
    while not is_so():
        await pilot.pause(0.01)


def on_screen(pilot: Pilot[None]) -> list[str]:
    return [strip.text.rstrip() for strip in pilot.app.screen._compositor.render_strips()]


def says(pilot: Pilot[None], text: str) -> bool:
    return any(text in line for line in on_screen(pilot))


def table(pilot: Pilot[None]) -> DataTable[Any]:
    assert isinstance(pilot.app.screen, ListScreen)
    return pilot.app.screen.query_one(DataTable)


def cells(pilot: Pilot[None]) -> list[list[str]]:
    own = table(pilot)
    return [[cell.plain for cell in own.get_row_at(row)] for row in range(own.row_count)]


async def typed(pilot: Pilot[None], key: str, line: str) -> None:
    """Press a key that asks for a line, write one, and confirm."""
    await pilot.press(key)
    asked = pilot.app.focused
    assert isinstance(asked, Input)
    asked.value = line
    await pilot.press("enter")


# --------------------------------------------------------------------------------------------------- the list


def test_the_list_has_every_attempt_and_the_state_of_the_run(run) -> None:
    folder, stored = run

    async def story(pilot: Pilot[None]) -> None:
        rows = cells(pilot)
        assert [row[0] for row in rows] == [str(one.step) for one in stored]
        outcomes = [one.trajectory.outcome if one.trajectory else one.failed.outcome for one in stored]
        assert [row[4] for row in rows] == [one.value.replace("_", " ") for one in outcomes]
        await until(pilot, lambda: says(pilot, "first  stopped · step 4 of 9 · reward 0.400 · lag 0.50 of 2"))
        assert says(pilot, f"{len(stored)} attempts")

    driven([folder], story)


def test_filters_and_order_are_those_of_the_page(run) -> None:
    folder, stored = run
    kept = [s for s in stored if s.trajectory and s.trajectory.outcome is Outcome.TRUNCATED and s.step > 2]

    async def story(pilot: Pilot[None]) -> None:
        await typed(pilot, "slash", "outcome:truncated step:3..")
        await until(pilot, lambda: says(pilot, f"{len(kept)} attempts"))
        assert [row[9] for row in cells(pilot)] == [str(s.trajectory.num_action_tokens) for s in kept]
        await typed(pilot, "s", "-sampled")
        await until(pilot, lambda: says(pilot, "sorted by -sampled"))
        most = sorted((s.trajectory.num_action_tokens for s in kept), reverse=True)
        assert [row[9] for row in cells(pilot)] == [str(number) for number in most]
        await typed(pilot, "slash", "reward:much")
        await until(pilot, lambda: says(pilot, "reward='much' is no number and no range of numbers"))
        assert len(cells(pilot)) == len(kept), "what was there stays"
        await pilot.press("escape")
        assert says(pilot, " outcome:truncated step:3..")
        await typed(pilot, "s", "task")
        await until(pilot, lambda: says(pilot, "sort='task': sort by newest, step"))

    driven([folder], story, line="step:1")


def test_a_wrong_filter_of_the_command_is_refused(run) -> None:
    with pytest.raises(DataError, match="reward='much' is no number"):
        TerminalApp(open_sources([run[0]]), tokenizer=None, line="reward:much")


def test_more_rows_are_loaded_as_the_cursor_goes_down(tmp_path: Path) -> None:
    made = [make_trajectory([-1, 0], group_id=number) for number in range(230)]
    write_parquet(tmp_path / "a.parquet", encode(made))

    async def story(pilot: Pilot[None]) -> None:
        assert table(pilot).row_count == 100
        for least in (200, 230):
            await pilot.press("ctrl+end")
            await until(pilot, lambda least=least: table(pilot).row_count >= least)
        await pilot.press("ctrl+end", "enter")
        await until(pilot, lambda: says(pilot, "group 229, member 0"))

    driven([tmp_path], story)


def test_a_new_step_appears_by_itself_and_the_cursor_stays_where_it_was(tmp_path: Path) -> None:
    stored = write_run(tmp_path)

    async def story(pilot: Pilot[None]) -> None:
        await pilot.press("j", "j", "j")
        before = cells(pilot)[3]
        made = [random_trajectory(random.Random(5), group=70, member=m, version=4) for m in range(3)]
        write_parquet(tmp_path / "trajectories/step_000004.parquet", encode(made), step=4, learned_by=4)
        await until(pilot, lambda: table(pilot).row_count == len(stored) + 3)
        await until(pilot, lambda: table(pilot).cursor_row == 6)
        assert cells(pilot)[6] == before

    driven([tmp_path], story)


def test_several_runs_are_shown_in_turn(run, tmp_path: Path) -> None:
    folder, stored = run
    other = write_run(tmp_path / "second", seed=1, steps=2)

    async def story(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: says(pilot, "first  (1 of 2)"))
        for title, own in (("second  (2 of 2)", other), ("first  (1 of 2)", stored)):
            await pilot.press("right_square_bracket")
            await until(
                pilot, lambda title=title, own=own: says(pilot, title) and says(pilot, f"{len(own)} attempts")
            )
            assert len(cells(pilot)) == len(own)

    driven([folder, tmp_path / "second"], story)


def test_help_names_every_key_of_the_screens() -> None:
    told = {key for keys, _ in KEYS for key in keys.split() if len(key) == 1 and key.isascii()}
    bindings = [*ListScreen.BINDINGS, *AttemptScreen.BINDINGS]
    shown = {binding.key_display or binding.key for binding in bindings if binding.description != "reload"}
    assert told == {key for key in shown if len(key) == 1} - {"?"}


# ------------------------------------------------------------------------------------------------ one attempt


def test_an_attempt_is_opened_and_its_neighbours_by_keys(run) -> None:
    folder, stored = run
    kept = [s for s in stored if s.trajectory and s.trajectory.outcome is Outcome.COMPLETED]
    where = [f"group {s.trajectory.group_id}, member {s.trajectory.member}" for s in kept]

    async def story(pilot: Pilot[None]) -> None:
        await pilot.press("j", "enter")
        await until(pilot, lambda: says(pilot, where[1]))
        for message in kept[1].trajectory.messages:
            assert says(pilot, harmless(message.content)), message
        await pilot.press("k")
        await until(pilot, lambda: says(pilot, where[0]))
        for place in where[1:3]:
            await pilot.press("j")
            await until(pilot, lambda place=place: says(pilot, place))
        await pilot.press("u")
        await until(pilot, lambda: isinstance(pilot.app.screen, ListScreen))
        assert table(pilot).cursor_row == 2
        await pilot.press("enter")
        await until(pilot, lambda: says(pilot, where[2]))
        own = kept[2]
        await pilot.press("g")
        group = [s for s in stored if s.step == own.step and s.trajectory is not None and s.set == own.set]
        group = [s for s in group if s.trajectory.group_id == own.trajectory.group_id]
        await until(pilot, lambda: says(pilot, f"{len(group)} attempts"))
        assert says(pilot, f"step:{own.step} set:{own.set} group:{own.trajectory.group_id}")

    driven([folder], story, line="outcome:completed")


def test_a_failure_that_left_only_its_report_is_shown(run) -> None:
    async def story(pilot: Pilot[None]) -> None:
        await pilot.press("enter")
        await until(pilot, lambda: says(pilot, "failed: ran out of luck"))
        assert says(pilot, "it was retried")
        assert says(pilot, "mine.py:3")
        await pilot.press("2")
        await until(pilot, lambda: says(pilot, "Its tokens were not kept."))

    driven([run[0]], story, line="set:failed")


def pieces_of(pilot: Pilot[None]) -> dict[int, StyledText]:
    """Return the piece of each token on the lines, by its place."""
    lines = pilot.app.screen.query_one(LinesView).lines
    return {piece.token: piece for line in lines for piece in line if piece.token is not None}


def test_tokens_are_all_there_in_colours_and_tell_their_numbers(run) -> None:
    folder, stored = run
    own, learned_by = stored[0].trajectory, stored[0].learned_by

    async def story(pilot: Pilot[None]) -> None:
        await pilot.press("enter")
        await until(pilot, lambda: says(pilot, f"group {own.group_id}, member {own.member}"))
        await pilot.press("2")
        await until(pilot, lambda: says(pilot, "sampled or context"))
        shown = pieces_of(pilot)
        assert [piece.text.strip() for piece in shown.values()] == [str(one) for one in own.token_ids]
        for coloring in COLORINGS:
            colored = pieces_of(pilot)
            assert [CONTEXT in colored[at].style for at in range(own.num_tokens)] == [
                not sampled for sampled in own.action_mask
            ], coloring
            await pilot.press("c")
        for at in range(own.num_tokens):
            await pilot.press("right")
            told = next(line for line in on_screen(pilot) if line.startswith(f" token {at} "))
            assert f"id {own.token_ids[at]} " in told
            if own.action_mask[at]:
                assert f"log-probability {own.behavior_logprobs[at]:.5g} " in told
                assert f"version {own.versions[at]}, lag {learned_by - own.versions[at]}" in told
            else:
                assert told.endswith("context")

    driven([folder], story)


def test_colours_follow_probability_and_lag(tmp_path: Path) -> None:
    made = make_trajectory([-1, 0, 0, 1], behavior_logprobs=[0.0, -0.01, -6.0, -0.01], versions=[-1, 3, 3, 8])
    write_parquet(tmp_path / "a.parquet", encode([made]), step=9, learned_by=8)

    async def story(pilot: Pilot[None]) -> None:
        await pilot.press("enter")
        await until(pilot, lambda: says(pilot, "member 0"))
        same = {}
        await pilot.press("2")
        for coloring in COLORINGS:
            styles = [piece.style for piece in pieces_of(pilot).values()]
            same[coloring] = [[styles[a] == styles[b] for b in range(1, a)] for a in range(2, 4)]
            await pilot.press("c")
        first, second, third = [[True], [True, True]], [[False], [True, False]], [[True], [False, False]]
        assert same == {
            "mask": first,
            "logprob": second,
            "ratio": first,
            "lag": third,
            "version": third,
            "turn": third,
        }

    driven([tmp_path], story)


def test_a_long_attempt_is_shown_in_parts(tmp_path: Path) -> None:
    made = make_trajectory(
        [-1] + [0] * 9000, messages=(Message("user", "?"), Message("assistant", "a" * 50_000))
    )
    write_parquet(tmp_path / "a.parquet", encode([made]))

    async def story(pilot: Pilot[None]) -> None:
        await pilot.press("enter")
        await until(pilot, lambda: says(pilot, "9,001 tokens"))
        lines = pilot.app.screen.query_one(LinesView)
        assert sum(piece.text.count("a") for line in lines.lines for piece in line) > 19_000
        assert any("30,000 more characters" in "".join(p.text for p in line) for line in lines.lines)
        await pilot.press("2")
        for keys, first, last in (("", 0, 3999), ("n", 4000, 7999), ("n", 8000, 9000), ("p", 4000, 7999)):
            await pilot.press(*keys)
            await until(pilot, lambda first=first: first in pieces_of(pilot))
            assert (min(pieces_of(pilot)), max(pieces_of(pilot))) == (first, last)

    driven([tmp_path], story)


# --------------------------------------------------------------------------------------- what models write


def test_what_a_model_wrote_cannot_reach_the_terminal(tmp_path: Path) -> None:
    made = write_hostile(tmp_path)

    async def story(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: says(pilot, "stopped"))
        screens = [on_screen(pilot)]
        await pilot.press("enter")
        await until(pilot, lambda: says(pilot, made.outcome.value.replace("_", " ")))
        for face in "123":
            await pilot.press(face)
            lines = pilot.app.screen.query_one(LinesView).lines
            screens += [on_screen(pilot), ["".join(piece.text for piece in line) for line in lines]]
        text = [line for screen in screens for line in screen]
        assert [line for line in text if CONTROL.search(line) or "\u200b" in line] == []
        assert any("\\x1b[31mred" in line for line in screens[2])
        assert any("<script>" in line for line in screens[2]), "it is there, as text"

    driven([tmp_path], story, line="step:9")


@given(st.text(st.characters(codec=None)))
def test_harmless_text_can_be_written_and_moves_nothing(text: str) -> None:
    shown = harmless(text)
    shown.encode()
    assert CONTROL.search(shown) is None
    assert "\t" not in shown
    assert shown.count("\n") == text.count("\n")
    assert harmless(shown) == shown


@given(
    st.lists(st.tuples(st.text("ab \n界é", max_size=9), st.booleans()), max_size=30),
    st.integers(0, 12),
)
def test_wrapping_loses_nothing_and_fits(texts: list[tuple[str, bool]], width: int) -> None:
    pieces = [
        StyledText(text, str(at), at if is_token else None) for at, (text, is_token) in enumerate(texts)
    ]
    lines = wrap(pieces, width)
    assert all(sum(cell_len(piece.text) for piece in line) <= max(width, MIN_WIDTH) for line in lines)
    for piece in pieces:
        shown = "".join(one.text for line in lines for one in line if one.style == piece.style)
        assert shown == piece.text.replace("\n", "")
    order = [int(one.style) for line in lines for one in line]
    assert order == sorted(order)
    assert len(lines) >= sum(piece.text.count("\n") for piece in pieces)


# --------------------------------------------------------------------------------------------- the command

COMMAND = [sys.executable, "-m", "agentrl.cli", "view"]


def test_the_command_runs_in_a_terminal_until_q(run) -> None:
    reader, writer = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    process = subprocess.Popen(
        [*COMMAND, str(run[0]), "--tui"], stdin=writer, stdout=writer, stderr=writer, env=env
    )
    os.close(writer)
    try:
        seen = b""
        while f"{len(run[1])} attempts".encode() not in seen:
            seen += os.read(reader, 65536)
        os.write(reader, b"q")
        while True:
            try:
                if not select.select([reader], [], [], 100)[0] or not (more := os.read(reader, 65536)):
                    break
            except OSError:  # the other end is closed
                break
            seen += more
        assert process.wait(100) == 0, seen[-2000:]
        assert b"\x1b[?1049l" in seen, "the terminal is given back"
    finally:
        process.kill()
        process.wait()
        os.close(reader)


@pytest.mark.parametrize(
    ("further", "complaint"),
    [
        ([], "--tui needs a terminal; without --tui a page is served, and --export writes a file"),
        (
            ["--export", "a.html"],
            "--tui shows attempts here, --export writes them to a file; give one of the",
        ),
    ],
)
def test_what_cannot_be_shown_here_is_refused_with_the_cure(run, further, complaint: str) -> None:
    found = CliRunner().invoke(app, ["view", str(run[0]), "--tui", *further])
    assert isinstance(found.exception, UserError)
    assert complaint in str(found.exception)
