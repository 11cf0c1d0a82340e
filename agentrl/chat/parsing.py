"""Parsing of sampled text into text, thoughts and calls: the part that all tool-call formats share.

A format defines where a call may begin (`opening`) and reads one call (`read`); the `TurnParser` does the
rest. The invariant: however the text is split into pieces, the result is that of the whole text. It holds
because a format returns None as long as more text could change its answer. No text makes a parser raise, and
the time is linear in the length of the text.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from agentrl.types import Message, ToolCall

Tools = Sequence[Mapping[str, Any]]
"""OpenAI function schemas."""

THINK = "<think>"
END_THINK = "</think>"

READS_PER_CHAR = 8
"""Budget for reading an incomplete call again when more text arrives: characters per new character. Keeps the
total linear.
"""

FREE_READS = 65_536
"""Initial budget, in characters. A call of usual length is thus read after every piece and reported at
once.
"""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """The text outside of calls and thoughts, the calls in the order they were written, and the thoughts."""

    text: str
    tool_calls: tuple[ToolCall, ...]
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the turn's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the turn's thoughts."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """One more complete call: only its end shows whether it can be read.

    `index` counts the turn's calls from 0.
    """

    index: int
    call: ToolCall


Delta = TextDelta | ReasoningDelta | CallDelta


@dataclass(frozen=True, slots=True)
class ParsedPiece:
    """What a format read up to `end` (exclusive): calls without an id, or `text` that is no call.

    `begins`: the kind of content that begins after this piece, on its own line.
    """

    end: int
    calls: tuple[ToolCall, ...] = ()
    text: str = ""
    begins: Literal["text", "reasoning"] | None = None


class SampledText:
    """The text known so far.

    `unfinished` is None while more text may come; after that, it is the error for a call without an end.
    `tools` are the schemas shown to the model.
    """

    def __init__(self, text: str, unfinished: str | None, tools: Tools) -> None:
        self.text = text
        self.unfinished = unfinished
        self.tools = tools
        self._found: dict[re.Pattern[str], tuple[int, re.Match[str] | None]] = {}

    def search(self, pattern: re.Pattern[str], start: int) -> re.Match[str] | None:
        """Return the first match of `pattern` at `start` or later.

        Results are cached: thousands of unclosed calls search for the same end.
        """
        searched_from, match = self._found.get(pattern, (len(self.text) + 1, None))
        if searched_from <= start and (match is None or start <= match.start()):
            return match
        match = pattern.search(self.text, start)
        self._found[pattern] = (start, match)
        return match

    def has(self, literal: str, start: int) -> bool | None:
        """Return whether the text continues with `literal` at `start`; None if text to come decides."""
        if self.text.startswith(literal, start):
            return True
        is_open = (
            self.unfinished is None
            and len(self.text) - start < len(literal)
            and literal.startswith(self.text[start:])
        )
        return None if is_open else False


class Parser(Protocol):
    """Splits a sampled turn into text, thoughts and calls.

    Never raises: a call that cannot be read has an `error`.
    """

    def __call__(
        self, text: str, *, turn: int, is_truncated: bool, tools: Tools = (), reads_calls: bool = True
    ) -> ParsedTurn:
        """Parse a turn.

        Args:
            text: the turn, with its special tokens.
            turn: index of the assistant turn.
            is_truncated: the turn was cut at a token limit.
            tools: the schemas shown to the model, for formats whose arguments have no types.
            reads_calls: False: the model has no tools; what looks like a call is text, as it was sampled.
        """


class ToolFormat(ABC):
    """How a family of models writes calls. Immutable; one instance serves all conversations."""

    name: str
    sign: re.Pattern[str]
    """Text that the chat templates of its models contain, and no other."""
    generality = 0
    """Of several formats whose sign a template contains, the least general counts."""
    marks: tuple[str, ...]
    """Text without any of these literals has neither calls nor thoughts."""
    opening: re.Pattern[str]
    """Where a call, a thought or another special part may begin."""
    partial: re.Pattern[str]
    """Matches the end of the text so far, if more text could turn it into an `opening`."""
    thought_end = re.compile(re.escape(END_THINK))
    partial_thought_end: re.Pattern[str]
    closing = ""
    """The mark that ends a call, for the error of a call without one."""

    def __init__(self, *marks: str) -> None:
        """`marks` open calls; `<think>` is added."""
        self.marks = (THINK, *marks)
        self.opening = re.compile("|".join(map(re.escape, self.marks)))
        self.partial = beginnings(self.marks)
        self.partial_thought_end = beginnings((END_THINK,))

    @abstractmethod
    def read(self, source: SampledText, start: int) -> ParsedPiece | None:
        """Read the piece that begins with the `opening` at `start`. Never raises.

        Returns None if text to come could change the result.
        """

    @abstractmethod
    def write(self, message: Message) -> str:
        """Return an assistant message as the model writes it, without the token that ends its turn."""

    def read_without_tools(self, source: SampledText, start: int) -> ParsedPiece | None:
        """Read a piece of a turn without tools: only thoughts and channels are read, all else is text."""
        piece = self.read(source, start)
        if piece is None or piece.begins is not None:
            return piece
        return ParsedPiece(piece.end, text=source.text[start : piece.end])

    def parse(
        self, text: str, *, turn: int, is_truncated: bool, tools: Tools = (), reads_calls: bool = True
    ) -> ParsedTurn:
        """Parse a whole turn; see `Parser`."""
        if not any(mark in text for mark in self.marks):
            return ParsedTurn(text, ())
        parser = TurnParser(self, turn=turn, tools=tools, reads_calls=reads_calls)
        parser.finish(text, is_truncated=is_truncated)
        return parser.parsed

    def broken(
        self, source: SampledText, start: int, name: str, error: str, *, marks: re.Pattern[str]
    ) -> ParsedPiece | None:
        """Return a call that cannot be read.

        It ends at its closing mark, else before the next of `marks`, else with the turn.
        """
        mark = source.search(marks, start)
        if mark is not None and mark[0] == self.closing:
            return ParsedPiece(mark.end(), (ToolCall("", name, None, error),))
        if mark is not None:
            return ParsedPiece(mark.start(), (ToolCall("", name, None, self.unfinished(is_truncated=False)),))
        return self.cut(source, name)

    @staticmethod
    def cut(source: SampledText, name: str) -> ParsedPiece | None:
        """Return a call that ends with the turn; None if the turn goes on."""
        if source.unfinished is None:
            return None
        return ParsedPiece(len(source.text), (ToolCall("", name, None, source.unfinished),))

    def unfinished(self, *, is_truncated: bool) -> str:
        """Return the error for a call without an end."""
        if is_truncated:
            return "the call was cut at the token limit"
        return f"the call is not closed by {self.closing}" if self.closing else "the call is not finished"


class TurnParser:
    """Parses one turn as it arrives: `feed` each piece of text, then `finish`.

    All deltas together make up `parsed`.
    """

    def __init__(
        self, tool_format: ToolFormat, *, turn: int, tools: Tools = (), reads_calls: bool = True
    ) -> None:
        """`turn` is the index of the assistant turn; `tools` are the schemas shown to the model;
        `reads_calls`: see `Parser`.

        If the generation prompt opened a thought, feed `<think>` first.
        """
        self._format = tool_format
        self._read_piece = tool_format.read if reads_calls else tool_format.read_without_tools
        self._turn = turn
        self._tools = tools
        self._known = ["\n"]  # one character already read (a turn begins a line), then all unread text
        self._num_known = 0
        self._credit = FREE_READS
        self._is_thinking = False
        self._deltas: list[Delta] = []
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[ToolCall] = []
        self._ids: set[str] = set()

    @property
    def parsed(self) -> ParsedTurn:
        """Everything read so far."""
        return ParsedTurn("".join(self._texts), tuple(self._calls), "".join(self._thoughts))

    @property
    def num_unread(self) -> int:
        """Characters fed so far that no delta accounts for."""
        return self._num_known

    def feed(self, text: str) -> list[Delta]:
        """Add the next piece of text, and return the new deltas."""
        self._known.append(text)
        self._num_known += len(text)
        self._credit += READS_PER_CHAR * len(text)
        # A reading costs all unread text, so it must fit the credit; see READS_PER_CHAR.
        if self._num_known <= self._credit:
            self._credit -= self._num_known
            self._read(None)
        return self._unreported()

    def finish(self, text: str = "", *, is_truncated: bool) -> list[Delta]:
        """Add the last piece of text, and return the remaining deltas.

        `is_truncated`: the turn was cut at a token limit.
        """
        self._known.append(text)
        self._read(self._format.unfinished(is_truncated=is_truncated))
        return self._unreported()

    def _unreported(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _read(self, unfinished: str | None) -> None:
        source = SampledText("".join(self._known), unfinished, self._tools)
        position, is_waiting = 1, False
        while position < len(source.text) and not is_waiting:
            position, is_waiting = (
                self._read_thought(source, position)
                if self._is_thinking
                else self._read_text(source, position)
            )
        self._known = [source.text[position - 1 :]]
        self._num_known = len(source.text) - position

    def _read_thought(self, source: SampledText, start: int) -> tuple[int, bool]:
        """Read up to the end of the thought; return the next position, and whether more text is needed."""
        end = self._format.thought_end.search(source.text, start)
        if end is None:
            stop = self._held(self._format.partial_thought_end, source, start)
            self._think(source.text[start:stop])
            return stop, True
        self._think(source.text[start : end.start()])
        self._is_thinking = False
        return end.end(), False

    def _read_text(self, source: SampledText, start: int) -> tuple[int, bool]:
        """Read up to and including the next call or thought.

        Returns the next position, and whether more text is needed.
        """
        opening = self._format.opening.search(source.text, start)
        if opening is None:
            stop = self._held(self._format.partial, source, start)
            self._say(source.text[start:stop])
            return stop, True
        self._say(source.text[start : opening.start()])
        if opening[0] == THINK:
            piece: ParsedPiece | None = ParsedPiece(opening.end(), begins="reasoning")
        else:
            piece = self._read_piece(source, opening.start())
        if piece is None:
            return opening.start(), True
        self._take(piece)
        return piece.end, False

    @staticmethod
    def _held(partial: re.Pattern[str], source: SampledText, start: int) -> int:
        """Return the position from which the text may belong to a mark that is not complete yet."""
        match = None if source.unfinished is not None else partial.search(source.text, start)
        return len(source.text) if match is None else match.start()

    def _take(self, piece: ParsedPiece) -> None:
        self._say(piece.text)
        for call in piece.calls:
            self._call(call)
        if piece.begins == "text" and self._texts and not self._texts[-1].endswith("\n"):
            self._say("\n")
        elif piece.begins == "reasoning":
            self._is_thinking = True
            if self._thoughts and not self._thoughts[-1].endswith("\n"):
                self._think("\n")

    def _say(self, text: str) -> None:
        if text:
            self._texts.append(text)
            self._deltas.append(TextDelta(text))

    def _think(self, text: str) -> None:
        if text:
            self._thoughts.append(text)
            self._deltas.append(ReasoningDelta(text))

    def _call(self, call: ToolCall) -> None:
        index = len(self._calls)
        if not call.id or call.id in self._ids:
            call = ToolCall(call_id(self._turn, index), call.name, call.arguments, call.error)
        self._ids.add(call.id)
        self._calls.append(call)
        self._deltas.append(CallDelta(index, call))


def call_id(turn: int, index: int) -> str:
    """Return the id of a call: unique in a trajectory; nine letters and digits, as some templates demand."""
    return f"call{turn:03d}{index:02d}"


def beginnings(marks: Sequence[str], further: str = "") -> re.Pattern[str]:
    """Return a pattern for a proper prefix of any of `marks`, or for `further`, at the end of a text."""
    begun = {mark[0]: [other for other in marks if other[0] == mark[0]] for mark in marks}
    choices = [
        f"{re.escape(first)}(?:{'|'.join(_rest(mark[1:-1]) for mark in same)})"
        for first, same in begun.items()
    ]
    return re.compile(rf"(?:{'|'.join([*choices, *([further] if further else [])])})\Z")


def _rest(text: str) -> str:
    """Return a pattern for each prefix of `text`, the empty one included, at the end of a text."""
    return r"\Z" if not text else rf"(?:\Z|{re.escape(text[0])}{_rest(text[1:])})"
