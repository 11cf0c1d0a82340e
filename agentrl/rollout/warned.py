"""Warnings of a rollout process, which the driver shows on its console."""

from __future__ import annotations

import logging
from typing import Final

from agentrl.tracking.redact import redact

MAX_TOLD: Final = 50
"""Different warnings that one process tells; all are in its own log."""
MAX_CHARS: Final = 1_000


class ToldWarnings(logging.Handler):
    """Keeps what agentrl warned of in this process, each text once, in order, without secrets.

    Written by any thread. Nothing is ever removed, so that a reader needs only to know how many it has read.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: dict[str, None] = {}

    def __enter__(self) -> ToldWarnings:
        logging.getLogger("agentrl").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("agentrl").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._lines) > MAX_TOLD:
            return
        text = redact({"text": record.getMessage()[:MAX_CHARS]})["text"]
        if len(self._lines) == MAX_TOLD:
            text = "further warnings are in the log of this rollout actor only"
        self._lines.setdefault(text)

    def since(self, position: int) -> tuple[str, ...]:
        """Return the lines after the first `position`."""
        return tuple(self._lines)[position:]
