"""Shortened text: within its budget, unchanged when it fits, an exact prefix and suffix when not."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.rollout.shorten import SURROGATES, Keep, shorten

NOTICE = re.compile(r"\n?\[\.\.\. (about )?(\d+) tokens cut \.\.\.\]\n?")
TEXTS = st.one_of(
    st.text(st.characters(), max_size=300),  # surrogates included
    st.text("ab é\n<|im_end>漢👩‍👧", max_size=300),
    st.builds(lambda piece, times: piece * times, st.text(min_size=1, max_size=20), st.integers(1, 40)),
)
KEEPS = get_args(Keep)


@settings(deadline=None, max_examples=300)
@given(text=TEXTS, max_tokens=st.integers(1, 80), keep=st.sampled_from(KEEPS))
def test_a_budget_is_a_budget(stage, text, max_tokens, keep):
    short = shorten(text, max_tokens, stage.chat, keep=keep)
    whole = SURROGATES.sub("\ufffd", text)
    num_tokens = len(stage.chat.encode(whole))
    assert len(stage.chat.encode(short)) <= max_tokens
    if num_tokens <= max_tokens:
        assert short in (text, whole)
        return
    found = next((match for match in NOTICE.finditer(short) if int(match[2]) <= num_tokens), None)
    head, tail = (short[: found.start()], short[found.end() :]) if found else (short, "")
    if found is None:  # no room for the notice: the two ends meet
        places = [
            n for n in range(len(short) + 1) if whole.startswith(short[:n]) and whole.endswith(short[n:])
        ]
        assert places
        return
    assert whole.startswith(head) or keep == "tail"
    assert whole.endswith(tail) or keep == "head"
    assert not (head if keep == "tail" else tail if keep == "head" else "")
    assert not found[1]


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ("head", "0123456789012345678\n[... 81 tokens cut ...]"),
        ("tail", "[... 81 tokens cut ...]\n1234567890123456789"),
        ("ends", "012345678\n[... 82 tokens cut ...]\n123456789"),
    ],
)
def test_the_notice_counts_what_is_gone(keep, expected):
    assert shorten("0123456789" * 10, 44, Characters(), keep=keep) == expected


@pytest.mark.parametrize("keep", KEEPS)
def test_megabytes_are_not_tokenized(keep):
    codec = Characters()
    short = shorten("a" * 10_000_000 + "b", 60, codec, keep=keep)
    assert "[... about 9999" in short
    assert short.endswith("b") == (keep != "head")
    assert short.startswith("a") == (keep != "tail")
    assert codec.num_encoded < 20_000


def test_short_plain_text_is_not_tokenized_at_all():
    codec = Characters()
    assert shorten("42", 60, codec) == "42"
    assert codec.num_encoded == 0


class Characters:
    """A tokenizer whose tokens are characters, and which counts its work."""

    def __init__(self) -> None:
        self.num_encoded = 0

    def encode(self, text: str) -> list[int]:
        self.num_encoded += len(text)
        return list(map(ord, text))

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


class Composing(Characters):
    """Normalises as some tokenizers do: what it decodes is not what it encoded."""

    def encode(self, text: str) -> list[int]:
        return super().encode(text.replace("e\u0301", "é"))


@pytest.mark.parametrize("keep", KEEPS)
def test_a_tokenizer_that_normalises_still_keeps_exact_ends(keep):
    text = "e\u0301x" * 50
    short = shorten(text, 50, Composing(), keep=keep)
    head, tail = NOTICE.split(short)[0], NOTICE.split(short)[-1]
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(Composing().encode(short)) <= 50
