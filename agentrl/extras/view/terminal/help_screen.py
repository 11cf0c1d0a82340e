"""The screen that explains keys, filters and columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from agentrl.extras.view.columns import COLUMNS
from agentrl.extras.view.terminal.lines import StyledText
from agentrl.extras.view.terminal.lines_view import LinesView

KEYS = (
    ("j k", "next, previous: row of the list, or attempt"),
    ("enter u", "open an attempt; back to the list"),
    ("/", "filter; escape leaves the line"),
    ("s", "sort by a number; a click on a column's head does it, too"),
    ("]", "the next of several runs"),
    ("1 2 3", "of an attempt: conversation, tokens, facts"),
    ("← →", "point at a token and tell its numbers"),
    ("c", "colour tokens by mask, probability, lag, version or turn"),
    ("n p", "next, previous part of the tokens of a long attempt"),
    ("g", "list the group of the attempt"),
    ("q", "quit"),
)
FILTERS = (
    ("step:40 reward:0..0.5 sampled:300..", "numbers in a range, both ends included"),
    ("outcome:truncated,turn_limit tool:search", "one of several values"),
    ('task:train:17 failure:"ran out"', "texts that contain this, whatever the case"),
    ("seventeen", "messages, thoughts or calls in which this occurs"),
)


class HelpScreen(ModalScreen[None]):
    """Keys, the language of the filters, and the columns; any of its keys closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,u,question_mark,enter", "app.pop_screen", "close")
    ]

    def compose(self) -> ComposeResult:
        yield LinesView(id="help")

    def on_mount(self) -> None:
        self.query_one(LinesView).show(_pieces())


def _pieces() -> Iterator[StyledText]:
    columns = tuple((column.name, column.meaning) for column in COLUMNS)
    for title, rows in (("Keys", KEYS), ("Filters", FILTERS), ("Columns", columns)):
        yield StyledText(f"{title}\n", "bold")
        width = max(len(name) for name, _ in rows) + 2
        for name, meaning in rows:
            yield StyledText(f"  {name:<{width}}", "cyan")
            yield StyledText(f"{meaning}\n")
        yield StyledText("\n")
