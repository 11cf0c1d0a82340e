"""Error messages for chat templates that edit the history."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.codec import CALL, THOUGHT, TURN, Codec
from agentrl.errors import ConfigError

CONTEXT = 6
"""Tokens shown before and after the first difference."""


def prefix_error(codec: Codec, prefix: str, longer: str) -> ConfigError:
    """Return the error for two renders, the first of which should be a prefix of the second."""
    names = {TURN: "(said)", THOUGHT: "(thought)", CALL: "(call)"}
    texts = [prefix, longer]
    for mark, name in names.items():
        texts = [text.replace(mark, name) for text in texts]
    return token_error(codec, *map(codec.encode_rendered, texts))


def token_error(codec: Codec, before: Sequence[int], after: Sequence[int]) -> ConfigError:
    """Return the error for a conversation whose tokens differ from a later render of the same messages."""
    return ConfigError(
        "the chat template edits earlier turns when the conversation continues, so sampled "
        "tokens would not be a prefix of the next prompt; "
        f"{token_difference(codec, before, after)}\nset model.chat_template to a template that "
        "only appends, or model.template_edits=fork"
    )


def token_difference(codec: Codec, before: Sequence[int], after: Sequence[int]) -> str:
    """Return four lines that show where two token sequences diverge."""
    position = first_difference(before, after)
    start = max(0, position - CONTEXT)
    return (
        f"first difference at token {position}\n"
        f"  both begin        {_show(codec, before[start:position])}\n"
        f"  the tokens so far {_show(codec, before[position : position + CONTEXT])}\n"
        f"  the later render  {_show(codec, after[position : position + CONTEXT])}"
    )


def first_difference(left: Sequence[object], right: Sequence[object]) -> int:
    """Return the first index at which two sequences differ; the shorter length if one is a prefix."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(left), len(right)))


def _show(codec: Codec, ids: Sequence[int]) -> str:
    return " ".join(repr(codec.decode([id])) for id in ids) or "(the end)"
