"""Helpers for formats that write a turn as a model does."""

from __future__ import annotations

from agentrl.chat.parsing import END_THINK, THINK


def with_thought(reasoning: str, text: str) -> str:
    """Return `text` after its thought, as most models write it."""
    return f"{THINK}\n{reasoning}\n{END_THINK}\n\n{text}" if reasoning else text
