"""Chats of a template that a test wrote, and what tools may be called with."""

from hypothesis import strategies as st

from agentrl.chat.chat import Chat
from agentrl.chat.template import ChatTemplate


def template_chat(
    tokenizer, source: str, *, end: str = "<|im_end|>", named=None, tool_format="hermes", edits="fork"
) -> Chat:
    """Return a chat of the template `source`, in which `end` ends a turn; `named` are its named tokens."""
    return Chat(
        tokenizer,
        ChatTemplate({"default": source}, named or {}),
        eos_token_ids=[tokenizer.token_to_id(end)],
        tool_format=tool_format,
        edits=edits,
    )


def json_values(texts: st.SearchStrategy[str]) -> st.SearchStrategy:
    """Return values of JSON, up to 8 leaves; strings and keys are of `texts`."""
    floats = st.floats(allow_nan=False, allow_infinity=False)
    return st.recursive(
        st.none() | st.booleans() | st.integers(-(2**60), 2**60) | floats | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=8,
    )
