"""The screen of one attempt: its conversation, its tokens with the numbers of one, or facts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Footer, Static
from textual.worker import get_current_worker

from agentrl.errors import AgentRLError
from agentrl.extras.view.attempt import MAX_TOKENS, ShownAttempt, show
from agentrl.extras.view.attempts import AttemptTable, Filters
from agentrl.extras.view.shelf import Shelf
from agentrl.extras.view.terminal.conversation import conversation, facts, headline
from agentrl.extras.view.terminal.lines import StyledText, harmless
from agentrl.extras.view.terminal.lines_view import LinesView
from agentrl.extras.view.terminal.tokens import COLORINGS, TokenPart, legend

Face = Literal["conversation", "tokens", "facts"]


@dataclass(frozen=True, slots=True)
class Listing:
    """What the list shows: which attempts, in which order."""

    filters: Filters
    sort: str

    def key_at(self, table: AttemptTable, place: int, *, goes_on: Callable[[], bool]) -> str | None:
        """Return the key of the attempt at a place; None: the list or the search ended before."""
        while goes_on():
            page = table.page(self.filters, sort=self.sort, offset=place, limit=1)
            if page.rows or page.is_complete:
                return page.rows[0].key if page.rows else None
        return None


@dataclass(frozen=True, slots=True)
class LeftAttempt:
    """What the list does next: it goes to a place, or lists other attempts. line: filters, as typed."""

    place: int
    line: str | None = None


def rich_text(pieces: list[StyledText]) -> Text:
    """Return pieces as a text of rich's, in which nothing is markup."""
    return Text.assemble(*((piece.text, piece.style) for piece in pieces))


class AttemptScreen(Screen[LeftAttempt]):
    """One attempt of a listing."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "face('conversation')", "conversation"),
        Binding("2", "face('tokens')", "tokens"),
        Binding("3", "face('facts')", "facts"),
        Binding("c", "recolor", "colour"),
        Binding("n", "part(1)", "more tokens", show=False),
        Binding("p", "part(-1)", "earlier tokens", show=False),
        Binding("j", "beside(1)", "next"),
        Binding("k", "beside(-1)", "previous"),
        Binding("g", "group", "its group"),
        Binding("u,escape,backspace", "leave", "back", key_display="u"),
    ]

    def __init__(self, shelf: Shelf, listing: Listing, place: int, key: str) -> None:
        super().__init__()
        self._shelf, self._listing, self._place, self._key = shelf, listing, place, key
        self._face: Face = "conversation"
        self._coloring = COLORINGS[0]
        self._attempt: ShownAttempt | None = None
        self._part: TokenPart | None = None

    def compose(self) -> ComposeResult:
        yield Static(id="headline", markup=False)
        yield Static(id="legend", markup=False)
        yield LinesView(id="lines")
        yield Static(id="told", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#lines").focus()
        self._load(self._key)

    # ------------------------------------------------------------------------------------------------ reading

    @work(thread=True, exclusive=True, group="attempt")
    def _load(self, key: str, start: int = 0) -> None:
        """Read an attempt with its tokens from `start` on, and show it."""
        try:
            attempt = show(self._shelf.attempts, key)
            stored = self._shelf.attempts.read(key)
            part = None
            if stored.trajectory is not None:
                part = TokenPart(attempt, self._shelf.tokens(stored, start=start))
        except (AgentRLError, OSError) as error:
            self.app.call_from_thread(self._complain, str(error))
            return
        self.app.call_from_thread(self._show, key, attempt, part)

    @work(thread=True, exclusive=True, group="attempt")
    def _go(self, place: int) -> None:
        """Show the attempt at another place of the list, if there is one."""
        worker = get_current_worker()
        try:
            key = self._listing.key_at(self._shelf.table, place, goes_on=lambda: not worker.is_cancelled)
        except (AgentRLError, OSError) as error:
            self.app.call_from_thread(self._complain, str(error))
            return
        if key is not None:
            self.app.call_from_thread(self._went, place, key)

    def _went(self, place: int, key: str) -> None:
        self._place = place
        self._load(key)

    # ------------------------------------------------------------------------------------------------ showing

    def _show(self, key: str, attempt: ShownAttempt, part: TokenPart | None) -> None:
        self._key, self._attempt, self._part = key, attempt, part
        self.query_one("#headline", Static).update(rich_text(list(headline(attempt))))
        self._draw()

    def _draw(self, *, keeps_place: bool = False) -> None:
        if self._attempt is None:
            return
        lines, part = self.query_one(LinesView), self._part
        is_tokens = self._face == "tokens"
        self.query_one("#legend").display = is_tokens
        if not is_tokens:
            pieces = conversation(self._attempt) if self._face == "conversation" else facts(self._attempt)
            lines.show(pieces)
            self._tell("")
        elif part is None:
            lines.show([StyledText("Its tokens were not kept.", "dim")])
            self._tell("")
        else:
            self.query_one("#legend", Static).update(rich_text(list(legend(self._attempt, self._coloring))))
            lines.show(part.pieces(self._coloring), keeps_place=keeps_place)
            if lines.token is None:
                self._tell(self._where(part))

    @staticmethod
    def _where(part: TokenPart) -> str:
        end = part.tokens.start + len(part.tokens.ids)
        shown = f"tokens {part.tokens.start:,} to {end:,} of {part.tokens.total:,}; n and p: other parts"
        hint = "arrow keys tell the numbers of a token, c changes the colours"
        return hint if len(part.tokens.ids) == part.tokens.total else f"{shown}; {hint}"

    def _tell(self, text: str) -> None:
        self.query_one("#told", Static).update(Text(text))

    def _complain(self, text: str) -> None:
        self.query_one("#told", Static).update(Text(harmless(text), "red"))

    def on_lines_view_pointed(self, message: LinesView.Pointed) -> None:
        if self._part is not None:
            self._tell(self._part.facts(message.token))

    # --------------------------------------------------------------------------------------------------- keys

    def action_face(self, face: Face) -> None:
        self._face = face
        self._draw()

    def action_recolor(self) -> None:
        if self._face == "tokens":
            self._coloring = COLORINGS[(COLORINGS.index(self._coloring) + 1) % len(COLORINGS)]
        self._face = "tokens"
        self._draw(keeps_place=True)

    def action_part(self, by: int) -> None:
        """Show the next or the previous part of the tokens of a long attempt."""
        if self._part is None or self._face != "tokens":
            return
        start = self._part.tokens.start + by * MAX_TOKENS
        if 0 <= start < self._part.tokens.total:
            self._load(self._key, start)

    def action_beside(self, by: int) -> None:
        if self._place + by >= 0:
            self._go(self._place + by)

    def action_group(self) -> None:
        """List the group of the attempt."""
        if self._attempt is not None:
            own = self._attempt
            step = "" if own.step is None else f"step:{own.step} "
            self.dismiss(LeftAttempt(self._place, f"{step}set:{own.set} group:{own.group}"))

    def action_leave(self) -> None:
        self.dismiss(LeftAttempt(self._place))
