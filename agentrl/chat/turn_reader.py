"""Reading of a turn while it is sampled: tokens in, deltas of text, thoughts and calls out."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.codec import Codec
from agentrl.chat.parsing import Delta, TurnParser


class TurnReader:
    """Reads one turn as its tokens arrive.

    What it returns is what the whole turn is parsed into, but for white space around it. Where a tokenizer's
    decoding of a part differs from that of the whole, the deltas may differ as well: compare them with the
    parsed turn at its end.
    """

    def __init__(self, codec: Codec, parser: TurnParser, *, opening: str, stop_ids: Sequence[int]) -> None:
        """Args:
        opening: the opening tag, if the prompt opened a thought.
        stop_ids: they end a turn, and have no text.
        """
        self._codec = codec
        self._parser = parser
        self._stop_ids = frozenset(stop_ids)
        self._ids: list[int] = []
        self._start = self._end = 0  # the last ids with text, which the next ones are decoded with
        self._texts: list[str] = []
        self._num_chars = 0
        self._pending = opening  # text that the parser has not been fed

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """Add sampled tokens, and return the new deltas."""
        self._ids += [id for id in ids if id not in self._stop_ids]
        text = self._pending + self._new_text()
        if not text:
            return []
        self._pending = ""
        self._texts.append(text)
        self._num_chars += len(text)
        return self._parser.feed(text)

    @property
    def num_read_chars(self) -> int:
        """Characters of the turn's text that the deltas so far account for."""
        return self._num_chars - self._parser.num_unread

    def rest(self, start: int) -> str:
        """Return the text from its character `start` on, including what no delta accounts for."""
        held = self._codec.decode(self._ids[self._start :])[len(self._codec.decode(self._shown)) :]
        return ("".join(self._texts) + self._pending + held)[start:]

    @property
    def _shown(self) -> list[int]:
        return self._ids[self._start : self._end]

    def _new_text(self) -> str:
        """Return the text of the ids since the last call; "" while a character is incomplete."""
        text = self._codec.decode(self._ids[self._start :])
        if text.endswith("\ufffd"):
            return ""
        new = text[len(self._codec.decode(self._shown)) :]
        self._start, self._end = self._end, len(self._ids)
        return new
