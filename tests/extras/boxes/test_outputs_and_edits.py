"""Outputs of commands that are cut, and edits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.extras.boxes.edits import replaced
from agentrl.extras.boxes.inside.servant import Kept
from agentrl.plugins import WrongCall


@given(st.lists(st.binary(max_size=50)), st.integers(2, 40))
@settings(max_examples=100)
def test_the_beginning_and_the_end_of_an_output_are_kept(pieces: list[bytes], most: int) -> None:
    kept, whole = Kept(most), b"".join(pieces)
    for piece in pieces:
        kept.add(piece)
    half = max(1, most // 2)
    assert kept.num_lost == max(0, len(whole) - 2 * half)
    if kept.num_lost:
        assert kept.value().startswith(whole[:half])
        assert kept.value().endswith(whole[-half:])
    else:
        assert kept.value() == whole


@given(st.text("ab\n ", max_size=12), st.text("ab\n ", max_size=3), st.text("ab\n ", max_size=3))
@settings(max_examples=200)
def test_an_edit_replaces_what_is_there_once_and_is_refused_otherwise(text: str, old: str, new: str) -> None:
    if old and old != new and text.count(old) == 1:
        before, after = text.split(old)
        assert replaced(text, old, new, path="a") == before + new + after
    else:
        with pytest.raises(WrongCall):
            replaced(text, old, new, path="a")


@pytest.mark.parametrize(
    ("text", "old", "part"),
    [
        ("a\nb\na\n", "a", "contains `old` 2 times (lines 1, 3): include lines around it"),
        ("if x:\n    return 1\n", "if x:\n  return 1", "lines 1 to 2 differ from it in white space only"),
        ("def total(items):\n", "def totals(item):", "the line most like it is line 1: 'def total(items):'"),
        ("a\n", "", "a.py exists: `old` must be a part of it that is replaced, or all of it"),
        ("z\n", "z", "equal"),
    ],
)
def test_a_refused_edit_says_how_to_correct_it(text: str, old: str, part: str) -> None:
    with pytest.raises(WrongCall) as refused:
        replaced(text, old, "z", path="a.py")
    assert part in str(refused.value)
