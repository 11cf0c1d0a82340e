"""Anchors: turns of one task that were taken in the same state of their environment have equal ones.

The state before a turn is what tools and the partner reported as such since the line's turn before (`ToolResult.state`,
`InteractionReply.state`), in order. Where they reported none, it is what the model was shown since then: role, name and content of the
messages; before the first turn, that is the prompt. Ids of calls, which the model may make up, are no part of it, nor are the tokens: a
template that edits the history shows the same messages in others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from agentrl.types import Message


def anchor(task_id: str, messages: Sequence[Message], reported: Sequence[str]) -> int:
    """Return the hash of a state as an i64. `messages` are those shown since the last turn, `reported` the states since then."""
    state = ("state", *reported) if reported else ("messages", *((m.role, m.name, m.content) for m in messages))
    # `repr` tells every two such tuples apart, and writes text that is no valid Unicode.
    digest = hashlib.blake2b(repr((task_id, state)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
