"""What a parser of tool calls makes of a sampled turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from agentrl.types import ToolCall


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """The text outside of the calls, the calls in the order they were written, and what was thought before both."""

    text: str
    tool_calls: tuple[ToolCall, ...]
    reasoning: str = ""


class Parser(Protocol):
    """Split a sampled turn into its text and its calls. Never raises: a call that cannot be read carries an `error`."""

    def __call__(self, text: str, *, turn: int, is_truncated: bool) -> ParsedTurn:
        """`text` keeps the special tokens, `turn` counts assistant turns, `is_truncated`: cut at a token limit."""


def call_id(turn: int, index: int) -> str:
    """Return the id of a turn's call: unique in a trajectory, and nine letters and digits, as some templates demand."""
    return f"call{turn:03d}{index:02d}"
