"""The application in a terminal. It reads as the page does: files only, again when they change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from textual.app import App
from textual.binding import Binding, BindingType

from agentrl.extras.view.shelf import Shelf
from agentrl.extras.view.sources import ViewSource
from agentrl.extras.view.terminal.list_screen import ListScreen


class TerminalApp(App[None]):
    """Shows sources until the user quits."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "agentrl view"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c", "quit", show=False, priority=True)]
    CSS = """
    #state, #told, #count { height: auto; max-height: 4; padding: 0 1; }
    #headline { height: auto; max-height: 6; padding: 0 1; }
    #legend { height: auto; padding: 0 1; margin-top: 1; }
    #filter, #sort { height: 1; border: none; padding: 0 1; }
    #table, #lines { height: 1fr; }
    #lines { padding: 0 1; margin-top: 1; }
    #help { width: 90%; height: 90%; padding: 1 2; border: round $primary; background: $surface; }
    HelpScreen { align: center middle; }
    """

    def __init__(self, sources: Sequence[ViewSource], *, tokenizer: Path | None, line: str) -> None:
        """Show sources.

        Args:
            tokenizer: its folder; None: each run's own.
            line: filters to begin with, as on the page.

        Raises:
            DataError: a filter is no filter.
        """
        super().__init__()
        self._first = ListScreen([Shelf.of(source, tokenizer) for source in sources], line)

    def on_mount(self) -> None:
        self.push_screen(self._first)
