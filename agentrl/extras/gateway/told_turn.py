"""What a program is told of a turn while it is sampled, and at its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from agentrl.chat.parsing import Delta, ReasoningDelta, TextDelta
from agentrl.chat.turn_reader import TurnReader
from agentrl.extras.gateway.turns import Listener
from agentrl.types import Message

OpenReader = Callable[[], TurnReader | None]


class ToldTurn:
    """Tells a turn to a listener: its thoughts, its text, and at its end its calls.

    Only what can no longer change is told early: calls wait for the end of the turn, because all of them are
    text if one cannot be read. `finish` and `finish_as_text` return the message as it was told, which is what
    the program will send back.
    """

    def __init__(self, listener: Listener, open_reader: OpenReader | None) -> None:
        """`open_reader` is called when the first tokens come, and may return None.

        Without a reader, everything is told at the end.
        """
        self._listener = listener
        self._open_reader = open_reader
        self._reader: TurnReader | None = None
        self._num_heard = 0
        self._is_held = False  # nothing more is told until the end
        self._reasoning = ""
        self._text = ""
        self._spaces = ""  # white space that may turn out to be the end of the text
        self._num_told_chars = 0  # of the turn's text, as the reader counts them

    @property
    def is_early(self) -> bool:
        """Whether tokens can be told before the end."""
        return self._open_reader is not None

    def hear(self, ids: Sequence[int]) -> None:
        """Take further sampled tokens."""
        if self._open_reader is not None:
            self._reader, self._open_reader = self._open_reader(), None
        if self._reader is None:
            return
        self._num_heard += len(ids)
        deltas = self._reader.feed(ids)
        if self._is_held:
            return
        if self._is_ordered(deltas):
            for delta in deltas:
                self._tell(delta)
            self._num_told_chars = self._reader.num_read_chars
        else:
            self._is_held = True

    def finish(self, message: Message) -> Message:
        """Tell the rest of a turn whose calls are sent as calls; return the turn as it was told."""
        rest, reasoning = message.content, message.reasoning
        if reasoning.startswith(self._reasoning) and not self._text:
            self._think(reasoning[len(self._reasoning) :])
        if rest.startswith(self._text):
            self._say(rest[len(self._text) :])
        for call in message.tool_calls:
            self._listener.call(call)
        return dataclasses.replace(message, content=self._text, reasoning=self._reasoning)

    def finish_as_text(self, raw: str, ids: Sequence[int]) -> Message:
        """Tell the rest of a turn as text, as it was sampled. `raw` and `ids` are the whole of it."""
        if self._text or self._reasoning:
            assert self._reader is not None
            self._reader.feed(ids[self._num_heard :])
            self._say(self._spaces + self._reader.rest(self._num_told_chars).rstrip())
        else:
            self._say(raw)
        return Message("assistant", self._text, reasoning=self._reasoning)

    def _is_ordered(self, deltas: Sequence[Delta]) -> bool:
        """Return whether thoughts come before the text, and no call comes."""
        has_text = bool(self._text)
        for delta in deltas:
            if isinstance(delta, ReasoningDelta):
                if has_text:
                    return False
            elif isinstance(delta, TextDelta):
                has_text = has_text or bool(delta.text.strip())
            else:
                return False
        return True

    def _tell(self, delta: Delta) -> None:
        if isinstance(delta, ReasoningDelta):
            self._think(delta.text)
        elif isinstance(delta, TextDelta):
            text = self._spaces + delta.text if self._text else delta.text.lstrip()
            kept = text.rstrip()
            self._spaces = text[len(kept) :] if kept or self._text else ""
            self._say(kept)

    def _think(self, text: str) -> None:
        if text:
            self._reasoning += text
            self._listener.reasoning(text)

    def _say(self, text: str) -> None:
        if text:
            self._text += text
            self._listener.text(text)
