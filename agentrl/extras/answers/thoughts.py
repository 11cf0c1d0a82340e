"""Removal of thoughts from a response: an answer inside `<think>` does not count."""

from __future__ import annotations

import re

_NAMES = r"(?:think(?:ing)?|thoughts?|reason(?:ing)?|reflection|analysis|scratch_?pad|inner_monologue)"
_TAG = re.compile(
    rf"<\s?(?P<close>/)?\s?{_NAMES}\s?>|\[(?P<close_bracket>/)?THINK\]|<\|(?:begin|start)_of_thought\|>|(?P<end>(?<=<\|)end_of_thought\|>)"
    rf"|◁(?P<close_kimi>/)?think▷|<(?P<close_seed>/)?seed:think>",
    re.IGNORECASE,
)


def without_thoughts(text: str) -> str:
    """Return the text after the last closed thought, up to an unclosed one.

    A chat template may open the thought in the prompt, so a closing tag without an opening one also ends a
    thought. Text between two thoughts is work, not answer.
    """
    start = end = 0
    is_open = False
    for tag in _TAG.finditer(text):
        if any(tag[name] for name in ("close", "close_bracket", "end", "close_kimi", "close_seed")):
            start, is_open = tag.end(), False
        elif not is_open:
            end, is_open = tag.start(), True
    return text[start:end] if is_open else text[start:]
