"""Anchors: hashes of the environment's state before each turn. Turns of one task in the same state have equal
anchors.

The state before a turn is the sequence of states that tools and the partner reported since the line's
previous turn (`ToolResult.state`, `InteractionReply.state`). If none was reported, the state is the messages
shown since then: their roles, names, contents and images; before the first turn, that is the prompt. Call ids
are excluded, because the model may make them up. Tokens are excluded, because a template that edits the
history shows the same messages with other tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from agentrl.types import Message


def anchor(task_id: str, messages: Sequence[Message], reported: Sequence[str]) -> int:
    """Return the hash of a state as an i64.

    `messages` were shown, and `reported` states reported, since the last turn.
    """
    state = (
        ("state", *reported)
        if reported
        else ("messages", *((m.role, m.name, m.content, *(i.sha256 for i in m.images)) for m in messages))
    )
    # `repr` is injective on these tuples, and it escapes surrogates, which cannot be encoded.
    digest = hashlib.blake2b(repr((task_id, state)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
