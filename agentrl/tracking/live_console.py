"""`LiveConsole`: a panel with progress, key metrics and times at the bottom of a terminal."""

from __future__ import annotations

import atexit
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from threading import RLock

from rich.console import ConsoleRenderable
from rich.control import Control
from rich.live import Live
from rich.panel import Panel
from rich.segment import ControlType
from rich.text import Text

from agentrl.terminal_text import visible
from agentrl.tracking.closing_table import ClosingTable
from agentrl.tracking.metrics import StepRecord
from agentrl.tracking.panel import PanelState, draw_panel
from agentrl.tracking.terminal import OutputCapture, TerminalConsole

REFRESH_PER_S = 4
MAX_REPEATED = 5
"""Messages that are repeated after the screen had to be cleared; the log file has all of them."""


class ResizedLive(Live):
    """A live display that clears the screen when the terminal becomes narrower.

    The terminal has then wrapped or cut the lines of the old panel, so its first line cannot be found any
    more. The `recent` messages are repeated above the new panel.
    """

    def __init__(
        self,
        *,
        recent: Iterable[Text],
        console: TerminalConsole,
        get_renderable: Callable[[], Panel],
        redirects: bool,
    ) -> None:
        self._recent = recent
        self._width = console.size.width
        super().__init__(
            get_renderable=get_renderable,
            console=console,
            refresh_per_second=REFRESH_PER_S,
            redirect_stdout=redirects,
            redirect_stderr=redirects,
        )

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        before, self._width = self._width, self.console.size.width
        shown = super().process_renderables(renderables)
        if self._width < before and self.console.is_interactive:
            # replaces the control codes that move the cursor to the panel's first line
            shown[0] = Control(ControlType.CLEAR, ControlType.HOME)
            shown[1:1] = self._recent
        return shown


class LiveConsole:
    """A panel at the bottom of the terminal; messages and printed output scroll above it.

    Nothing else may write to a terminal while a display moves its cursor. Until `close`, standard output and
    error of this process and its children are redirected to `log_file`; its lines are read back and shown
    above the panel.
    """

    def __init__(
        self,
        total_steps: int | None,
        *,
        title: str = "agentrl",
        look: str | None = None,
        log_file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._lock = RLock()  # guards `_state`, which the display's thread draws
        self._state = PanelState(title, total_steps, look)
        self._logged_at = clock()
        self._capture = OutputCapture(log_file, self._show_foreign) if log_file is not None else None
        self._terminal = TerminalConsole(
            file=self._capture.terminal if self._capture else sys.stdout, highlight=False
        )
        self._recent: deque[Text] = deque(maxlen=MAX_REPEATED)
        self._live = ResizedLive(
            recent=self._recent,
            console=self._terminal,
            get_renderable=self._draw,
            redirects=self._capture is None,
        )
        self._is_closed = False
        self._live.start()
        atexit.register(self.close)  # the cursor and the output must be restored, however the process ends

    def say(self, text: str) -> None:
        self._print(Text(visible(text)))

    def log(self, record: StepRecord) -> None:
        with self._lock:
            self._state.add(record)
            self._logged_at = self._clock()

    def restore(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            self.log(record)

    def set_total_steps(self, total_steps: int) -> None:
        with self._lock:
            self._state.set_total_steps(total_steps)

    def set_phase(self, phase: str | None) -> None:
        with self._lock:
            self._state.phase = phase or self._state.phase  # showing the gaps between phases would flicker

    def set_servers(self, states: Mapping[str, str]) -> None:
        with self._lock:
            self._state.servers = dict(states)

    def show_closing(self, table: ClosingTable) -> None:
        self._end_panel()
        self._terminal.print()
        if table.rows:
            self._terminal.print(table.to_rich())
        for note in table.notes:
            self._terminal.print(Text(note))

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        self._end_panel()
        if self._capture is not None:
            self._capture.close()

    def _end_panel(self) -> None:
        with self._lock:
            self._state.phase = None
        self._live.stop()  # draws the last state once more and leaves it on the screen

    def _draw(self) -> Panel:
        with self._lock:
            return draw_panel(self._state, since_log_s=self._clock() - self._logged_at)

    def _show_foreign(self, lines: Sequence[str]) -> None:
        self._print(Text("\n").join(Text.from_ansi(line, style="dim") for line in lines))

    def _print(self, text: Text) -> None:
        self._terminal.print(text)
        self._recent.append(text)
