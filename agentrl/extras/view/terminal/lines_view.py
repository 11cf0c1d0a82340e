"""A widget that scrolls through lines: it draws only those on the screen, so that an attempt may be long."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import Click, Resize
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from agentrl.extras.view.terminal.lines import Line, StyledText, wrap

_POINTED = "bold white on #2850c8"


class LinesView(ScrollView, can_focus=True):
    """Lines that are wrapped to the width of the screen; one token may be pointed at."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right", "point(1)", "next token", show=False),
        Binding("left", "point(-1)", "previous token", show=False),
        Binding("space", "page_down", "page down", show=False),
    ]

    class Pointed(Message):
        """Another token is pointed at."""

        def __init__(self, token: int) -> None:
            self.token = token
            super().__init__()

    token: reactive[int | None] = reactive(None)

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._pieces: tuple[StyledText, ...] = ()
        self.lines: list[Line] = []

    def show(self, pieces: Iterable[StyledText], *, keeps_place: bool = False) -> None:
        """Show other pieces, from the beginning."""
        self._pieces = tuple(pieces)
        if not keeps_place:
            self.token = None
        self._lay_out()
        if not keeps_place:
            self.scroll_to(0, 0, animate=False)

    def on_resize(self, _: Resize) -> None:
        self._lay_out()

    def _lay_out(self) -> None:
        width = self.scrollable_content_region.width
        self.lines = wrap(self._pieces, width)
        self.virtual_size = Size(width, len(self.lines))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        number = y + self.scroll_offset.y
        line = self.lines[number] if number < len(self.lines) else ()
        own = self.rich_style
        segments = [Segment(piece.text, own + self._style(piece)) for piece in line]
        return Strip(segments).adjust_cell_length(self.size.width, own)

    def _style(self, piece: StyledText) -> Style:
        is_pointed = piece.token is not None and piece.token == self.token
        return Style.parse(f"{piece.style} {_POINTED}" if is_pointed else piece.style)

    def action_point(self, by: int) -> None:
        """Point at the next or the previous token; at the first one on the screen if there is none."""
        tokens = list(dict.fromkeys(p.token for line in self.lines for p in line if p.token is not None))
        if not tokens:
            return
        if self.token in tokens:
            at = min(len(tokens) - 1, max(0, tokens.index(self.token) + by))
            self.point_at(tokens[at])
        else:
            shown = self.lines[self.scroll_offset.y :]
            first = next((p.token for line in shown for p in line if p.token is not None), tokens[0])
            self.point_at(first)

    def point_at(self, token: int) -> None:
        """Point at a token, and scroll to it."""
        self.token = token
        line = next(number for number, line in enumerate(self.lines) if any(p.token == token for p in line))
        top, height = self.scroll_offset.y, self.scrollable_content_region.height
        if not top <= line < top + height:
            self.scroll_to(0, line - height // 2, animate=False)
        self.post_message(self.Pointed(token))

    def on_click(self, event: Click) -> None:
        number, cell = int(event.y + self.scroll_offset.y), 0
        for piece in self.lines[number] if number < len(self.lines) else ():
            cell += Segment(piece.text).cell_length
            if event.x < cell:
                if piece.token is not None:
                    self.point_at(piece.token)
                return
