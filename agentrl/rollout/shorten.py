"""Shortens a text to a token budget."""

from __future__ import annotations

import re
from typing import Literal, Protocol

Keep = Literal["head", "tail", "ends"]

MAX_CHARS_PER_TOKEN = 64
"""More characters than any tokenizer puts into one token.

Longer text is known to be too long without tokenizing it.
"""

MIN_KEPT_TOKENS = 2
"""If the budget leaves fewer tokens than this next to the notice, the notice is omitted."""

SURROGATES = re.compile("[\ud800-\udfff]")


class TextCodec(Protocol):
    """The part of `agentrl.chat.chat.Chat` that is needed here."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int], /) -> str: ...


def shorten(text: str, max_tokens: int, codec: TextCodec, *, keep: Keep = "ends") -> str:
    """Return `text` cut to at most `max_tokens` tokens, with a notice at the cut.

    `keep` chooses what remains: an exact prefix ("head"), an exact suffix ("tail"), or both ("ends"). The
    notice says how many tokens were cut ("about" if a huge text was not fully tokenized). A budget too small
    for the notice omits it.
    """
    if len(text) < max_tokens and text.isascii():  # a token of plain text is at least one character
        return text
    text = SURROGATES.sub("\ufffd", text)
    cut = _Cut(text, max_tokens, codec, keep)
    return text if cut.fits else cut.shortened()


class _Cut:
    """Both ends of a text in tokens. `_head` holds the whole text unless it is huge."""

    def __init__(self, text: str, max_tokens: int, codec: TextCodec, keep: Keep) -> None:
        self._text = text
        self._max_tokens = max_tokens
        self._codec = codec
        self._keep = keep
        most_chars = MAX_CHARS_PER_TOKEN * max_tokens
        self._is_whole = len(text) <= 2 * most_chars
        self._head = codec.encode(text if self._is_whole else text[:most_chars])
        self._tail = self._head if self._is_whole else codec.encode(text[-most_chars:])
        self._num_tokens = (
            len(self._head)
            if self._is_whole
            else round(len(text) / (2 * most_chars) * len(self._head + self._tail))
        )

    @property
    def fits(self) -> bool:
        return self._is_whole and len(self._head) <= self._max_tokens

    def shortened(self) -> str:
        room = self._max_tokens - len(self._codec.encode(self._notice(0)))
        has_notice = room >= MIN_KEPT_TOKENS
        room = room if has_notice else self._max_tokens
        while room > 0:
            head, tail = self._kept(room)
            short = head + (self._notice(room) if has_notice else "") + tail
            # Tokenization changes at the cuts and can produce more tokens than in the whole text.
            if (excess := len(self._codec.encode(short)) - self._max_tokens) <= 0:
                return short
            room -= excess
        return ""

    def _kept(self, room: int) -> tuple[str, str]:
        """Return the prefix and the suffix that together fit into `room` tokens."""
        num_head = {"head": room, "tail": 0, "ends": (room + 1) // 2}[self._keep]
        num_tail = room - num_head
        # A character split by the cut decodes to U+FFFD.
        head = self._codec.decode(self._head[:num_head]).rstrip("\ufffd")
        tail = self._codec.decode(self._tail[len(self._tail) - num_tail :]).lstrip("\ufffd")
        # Slice the original text, because a tokenizer that normalizes decodes to different characters.
        return self._text[: len(head)], self._text[len(self._text) - len(tail) :]

    def _notice(self, num_kept: int) -> str:
        about = "" if self._is_whole else "about "
        notice = f"[... {about}{self._num_tokens - num_kept} tokens cut ...]"
        return {"head": f"\n{notice}", "tail": f"{notice}\n", "ends": f"\n{notice}\n"}[self._keep]
