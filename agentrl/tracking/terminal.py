"""Terminal handling for a live display: all other output goes to a file and is shown above the display."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderableType
from rich.segment import Segment

from agentrl.terminal_text import visible

POLL_S = 0.2
JOIN_TIMEOUT_S = 5.0
SHOWN_LINES = 10
"""Lines shown from the beginning and from the end of a burst of output; the file has all of them."""


def is_terminal(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal that can show a live display."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


class TerminalConsole(Console):
    """A rich console that reads the size from its own file: descriptors 0-2 may be redirected."""

    @property
    def size(self) -> ConsoleDimensions:
        try:
            size = os.get_terminal_size(self.file.fileno())
        except (OSError, ValueError):
            return super().size
        return ConsoleDimensions(size.columns, size.lines) if size.columns and size.lines else super().size

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        raise AssertionError("the terminal decides its size")


class VisibleConsole(Console):
    """A rich console that prints control characters in the text visibly; its own styles still work."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


class OutputCapture:
    """Redirects descriptors 1 and 2 of this process, and so of its children, to a file, and reads it back.

    A pipe would be simpler. But children that outlive this process would die of SIGPIPE, and output printed
    during a crash would be lost.
    """

    def __init__(self, log_file: Path, on_lines: Callable[[Sequence[str]], None]) -> None:
        """Start redirecting.

        `on_lines` is called from a separate thread with complete lines, without newlines.
        """
        self.terminal: TextIO = os.fdopen(
            os.dup(1), "w", encoding=sys.stdout.encoding or "utf-8", errors="replace"
        )
        self._stderr = os.dup(2)
        self._on_lines = on_lines
        self._rest = b""
        self._ended = threading.Event()
        log_file.parent.mkdir(parents=True, exist_ok=True)
        # O_APPEND: several processes write, and none may overwrite another's output.
        with log_file.open("ab") as log:
            self._reader = log_file.open("rb")
            self._reader.seek(0, os.SEEK_END)
            _flush_python_streams()
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        self._thread = threading.Thread(target=self._follow, name="console-output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Restore descriptors 1 and 2, and pass on the remaining output. Idempotent."""
        if self._ended.is_set():
            return
        _flush_python_streams()
        os.dup2(self.terminal.fileno(), 1)
        os.dup2(self._stderr, 2)
        self._ended.set()
        self._thread.join(JOIN_TIMEOUT_S)
        self._pass_on(is_last=True)
        self._reader.close()
        os.close(self._stderr)

    def _follow(self) -> None:
        while not self._ended.wait(POLL_S):
            self._pass_on(is_last=False)

    def _pass_on(self, *, is_last: bool) -> None:
        *complete, self._rest = (self._rest + self._reader.read()).split(b"\n")
        if is_last and self._rest:
            complete, self._rest = [*complete, self._rest], b""
        # A progress bar rewrites its line with carriage returns: keep only its last state.
        lines = [line.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode(errors="replace") for line in complete]
        left_out = len(lines) - 2 * SHOWN_LINES
        if left_out > 0:
            lines = [
                *lines[:SHOWN_LINES],
                f"... {left_out} more lines in {Path(self._reader.name).name}",
                *lines[-SHOWN_LINES:],
            ]
        if lines:
            self._on_lines(lines)


def _flush_python_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
