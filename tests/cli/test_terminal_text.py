"""What models, tools and servers say is shown, and commands no terminal."""

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from agentrl.terminal_text import CONTROL, visible
from agentrl.tracking.console import PlainConsole
from agentrl.tracking.terminal import VisibleConsole

RED = "\x1b[31mred\x1b[0m"
TITLE = "\x1b]0;owned\x07"


@given(st.text())
def test_nothing_that_is_shown_commands_and_usual_text_stays(text):
    shown = visible(text)
    assert not CONTROL.search(shown)
    assert visible(shown) == shown
    if not CONTROL.search(text):
        assert shown == text


@given(st.text(max_size=30))
def test_a_console_shows_what_it_is_given_and_keeps_its_own_colours(text):
    out = io.StringIO()
    VisibleConsole(file=out, force_terminal=True, color_system="standard").print(
        Text(text + TITLE, style="bold")
    )
    left = out.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert "\x1b" not in left
    assert "\x07" not in left
    assert r"\x1b]0;owned" in left.replace("\n", "")


def test_the_log_of_a_run_shows_them_too():
    stream = io.StringIO()
    PlainConsole(None, stream=stream).say(f"tool {RED} is not available")
    assert stream.getvalue() == "tool \\x1b[31mred\\x1b[0m is not available\n"
