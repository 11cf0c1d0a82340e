"""The screen of a source: its state in a line, the filter, and the table of attempts."""

from __future__ import annotations

from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static
from textual.worker import get_current_worker

from agentrl.errors import AgentRLError, DataError
from agentrl.extras.view.attempts import Filters, Page, TableRow
from agentrl.extras.view.changes import POLL_S, state_of
from agentrl.extras.view.columns import KINDS
from agentrl.extras.view.run import Overview
from agentrl.extras.view.shelf import Shelf
from agentrl.extras.view.terminal.attempt_screen import AttemptScreen, LeftAttempt, Listing
from agentrl.extras.view.terminal.help_screen import HelpScreen
from agentrl.extras.view.terminal.lines import harmless, one_line

CHUNK = 100
"""Rows that are loaded at once; more are when the cursor comes near the last."""
MAX_CELL = 60
"""Characters of a text in a cell."""
SHOWN = (
    "step", "set", "task", "agent", "outcome", "reward", "margin", "turns", "calls", "sampled", "lag",
    "failure",
)  # fmt: skip
TITLES = {"margin": "± group", "sampled": "tokens"}
NEWEST = "newest"


class ListScreen(Screen[None]):
    """The attempts of the run that is chosen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "down", "down", show=False),
        Binding("k", "up", "up", show=False),
        Binding("enter", "open", "open"),
        Binding("slash", "ask('filter')", "filter", key_display="/"),
        Binding("s", "ask('sort')", "sort"),
        Binding("left_square_bracket,right_square_bracket", "other", "other run", key_display="]"),
        Binding("r", "reload", "reload", show=False),
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("q", "app.quit", "quit"),
        Binding("escape", "table", "to the table", show=False),
    ]

    def __init__(self, shelves: list[Shelf], line: str) -> None:
        super().__init__()
        self._shelves, self._number, self._line = shelves, 0, line
        self._listing = Listing(Filters.parse_line(line), NEWEST)
        self._rows: list[TableRow] = []
        self._total = 0
        self._state: dict[str, Any] | None = None

    @property
    def shelf(self) -> Shelf:
        return self._shelves[self._number]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        return action != "other" or len(self._shelves) > 1

    def compose(self) -> ComposeResult:
        yield Static(id="state", markup=False)
        yield Input(self._line, id="filter", placeholder="/ to filter: outcome:truncated step:10..20 words")
        yield Input(id="sort", placeholder="reward, -reward for the largest first, or newest")
        yield DataTable(id="table", cursor_type="row", zebra_stripes=True)
        yield Static(id="count", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#sort").display = False
        table = self._table
        for name in SHOWN:
            table.add_column(Text(TITLES.get(name, name)), key=name)
        table.focus()
        self._search()
        self._watch()
        self.set_interval(POLL_S, self._watch)

    @property
    def _table(self) -> DataTable[Text]:
        return self.query_one("#table", DataTable)

    # ---------------------------------------------------------------------------------------------- searching

    def _list(self, listing: Listing) -> None:
        """List other attempts, from the first."""
        self._listing, self._rows, self._total = listing, [], 0
        self._table.clear()
        self._search()

    @work(thread=True, exclusive=True, group="search")
    def _search(self, num_rows: int = CHUNK) -> None:
        """Load the first `num_rows` rows; show what was found while the search goes on."""
        worker, shelf, listing = get_current_worker(), self.shelf, self._listing
        try:
            while not worker.is_cancelled:
                page = shelf.table.page(listing.filters, sort=listing.sort, limit=num_rows)
                self.app.call_from_thread(self._draw, listing, page)
                if page.is_complete:
                    return
        except (AgentRLError, OSError) as error:
            self.app.call_from_thread(self._complain, str(error))

    def _draw(self, listing: Listing, page: Page) -> None:
        if listing is not self._listing:
            return  # something else was asked for meanwhile
        table, old, new = self._table, self._rows, list(page.rows)
        self._rows, self._total = new, page.total
        if [row.key for row in new[: len(old)]] == [row.key for row in old]:
            new = new[len(old) :]
        else:
            at = table.cursor_row
            kept = old[at].key if at and at < len(old) else None  # at the top, it stays at the newest
            table.clear()
            place = next((place for place, row in enumerate(new) if row.key == kept), 0)
            self.call_after_refresh(table.move_cursor, row=place, animate=False)
        for row in new:
            table.add_row(*(_cell(name, row.values) for name in SHOWN))
        searched = "" if page.is_complete else f", searched {100 * page.searched // max(1, page.of)} %"
        order = "" if listing.sort == NEWEST else f", sorted by {listing.sort}"
        self.query_one("#count", Static).update(Text(f"{page.total:,} attempts{searched}{order}"))

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        loaded = len(self._rows)
        if loaded < self._total and event.cursor_row >= loaded - CHUNK // 4:
            self._search(loaded + CHUNK)

    # ------------------------------------------------------------------------------------------ what changes

    @work(thread=True, exclusive=True, group="watch")
    def _watch(self) -> None:
        """Look whether the files changed, and show what did."""
        shelf, known = self.shelf, self._state
        state = state_of(shelf.source)
        if state == known:
            return
        overview = shelf.run.overview()
        has_attempts = known is not None and known["attempts"] != state["attempts"]
        self.app.call_from_thread(self._changed, shelf, state, overview, has_attempts)

    def _changed(self, shelf: Shelf, state: dict[str, Any], overview: Overview, has_attempts: bool) -> None:
        if shelf is not self.shelf:
            return
        self._state = state
        number = f"  ({self._number + 1} of {len(self._shelves)})" if len(self._shelves) > 1 else ""
        self.query_one("#state", Static).update(
            Text.assemble((one_line(overview.title), "bold"), (number, "dim"), "  ", state_line(overview))
        )
        if has_attempts:
            self.action_reload()

    # --------------------------------------------------------------------------------------------------- keys

    def action_down(self) -> None:
        self._table.action_cursor_down()

    def action_up(self) -> None:
        self._table.action_cursor_up()

    def action_table(self) -> None:
        self.query_one("#sort").display = False
        self.query_one("#filter", Input).value = self._line
        self._table.focus()

    def action_ask(self, name: str) -> None:
        """Let the user type filters or an order."""
        asked = self.query_one(f"#{name}", Input)
        asked.display = True
        asked.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        try:
            if event.input.id == "filter":
                listing = Listing(Filters.parse_line(event.value), self._listing.sort)
                self._line = event.value
            else:
                listing = Listing(self._listing.filters, _sort(event.value))
        except DataError as error:
            self._complain(str(error))
            return
        self.action_table()
        self._list(listing)

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        name = str(event.column_key.value)
        if KINDS[name] == "number":
            following = {f"-{name}": name, name: NEWEST}.get(self._listing.sort, f"-{name}")
            self._list(Listing(self._listing.filters, following))

    def on_data_table_row_selected(self, _: DataTable.RowSelected) -> None:
        self.action_open()

    def action_open(self) -> None:
        place = self._table.cursor_row
        if place < len(self._rows):
            screen = AttemptScreen(self.shelf, self._listing, place, self._rows[place].key)
            self.app.push_screen(screen, self._came_back)

    def _came_back(self, left: LeftAttempt | None) -> None:
        if left is None:
            return
        if left.line is not None:
            self._line = left.line
            self.action_table()
            self._list(Listing(Filters.parse_line(left.line), NEWEST))
        elif left.place < len(self._rows):
            self._table.move_cursor(row=left.place, animate=False)

    def action_other(self) -> None:
        """Show the next of several runs."""
        self._number = (self._number + 1) % len(self._shelves)
        self._state = None
        self._list(Listing(self._listing.filters, self._listing.sort))
        self._watch()

    def action_reload(self) -> None:
        self._search(max(CHUNK, len(self._rows)))

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen())

    def _complain(self, text: str) -> None:
        self.query_one("#count", Static).update(Text(harmless(text), "red"))


def _sort(text: str) -> str:
    """Return an order as the table wants it. Raises DataError: it names no number."""
    sort = text.strip() or NEWEST
    if sort != NEWEST and KINDS.get(sort.removeprefix("-")) != "number":
        names = ", ".join(name for name, kind in KINDS.items() if kind == "number")
        raise DataError(f"sort={sort!r}: sort by {NEWEST}, {names}, or - and one of them")
    return sort


def _cell(name: str, values: Any) -> Text:
    """Return a cell of the table; nothing in it is markup."""
    value = values[name]
    if name == "set":
        value = values["became"] or (f"{value}: {values['policy']}" if values["policy"] else value)
    if KINDS[name] == "number":
        text = "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
        style = "green" if name == "margin" and value and value > 0 else ""
        style = "red" if name == "margin" and value and value < 0 else style
        return Text(text, style, justify="right")
    text = one_line(str(value or "").replace("_", " ") if name in ("set", "outcome") else str(value or ""))
    return Text(text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 1]}…", no_wrap=True)


def state_line(overview: Overview) -> str:
    """Return the state of a source in a line."""
    if overview.kind != "run":
        return overview.kind
    of = "" if overview.steps is None else f" of {overview.steps:,}"
    parts = [overview.state, f"step {overview.step:,}{of}"]
    for title, name in (("reward", "rollout/reward_mean"), ("accuracy", "rollout/accuracy")):
        if name in overview.latest:
            parts.append(f"{title} {overview.latest[name]:.3f}")
    if "rollout/lag/mean" in overview.latest:
        bound = "" if overview.max_staleness is None else f" of {overview.max_staleness}"
        parts.append(f"lag {overview.latest['rollout/lag/mean']:.2f}{bound}")
    if overview.eta_s is not None:
        parts.append(f"{overview.eta_s / 60:.0f} min left")
    if overview.num_failures:
        parts.append(f"{overview.num_failures:,} failures")
    return " · ".join(parts)
