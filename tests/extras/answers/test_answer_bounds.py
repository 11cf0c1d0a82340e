"""How far the search for an answer goes: lengths of texts and lines, and the signs around a number."""

from __future__ import annotations

import pytest

from agentrl.extras.answers import aime
from agentrl.extras.answers.aime import Aime, extract_integer
from agentrl.extras.answers.answer_number import concluding_number, stated_number
from agentrl.extras.answers.boxed import MAX_MARKED_CHARS
from agentrl.extras.answers.format import Format, is_think_answer
from agentrl.extras.answers.gsm8k import Gsm8k, canonical, extract_answer
from agentrl.extras.answers.math import Math
from agentrl.plugins import Attempted
from agentrl.types import Message
from parts.trajectories import attempted, make_task


def test_only_the_end_of_a_response_is_searched():
    assert extract_answer("The answer is 7." + " blah" * 300, strict=False) == 7
    assert extract_answer("The answer is 7." + " blah" * 1000, strict=False) is None


@pytest.mark.parametrize("source", ["gsm8k", "aime", "math"])
def test_all_checkers_search_the_same_end_of_a_response(source):
    """A thinking model may sum its answer up behind the box."""
    reward = {"gsm8k": Gsm8k, "aime": Aime, "math": Math}[source]({"strict": False})
    for marked in [r"\boxed{42}", "#### 42"][: 1 + (source == "gsm8k")]:
        task = make_task("q", "42")
        assert reward.score(attempted(task, marked + "\nblah" * (MAX_MARKED_CHARS // 5 - 5))).value == 1.0
        assert reward.score(attempted(task, marked + "\nblah" * (MAX_MARKED_CHARS // 5))).value == 0.0
    assert reward.score(attempted(task, "The answer is 42." + "\nblah" * 790)).value == 1.0
    assert reward.score(attempted(task, "The answer is 42." + "\nblah" * 810)).value == 0.0


def test_a_box_counts_if_it_lies_whole_in_the_end_of_a_response():
    whole = r"\boxed{7}".ljust(MAX_MARKED_CHARS)
    for text, number in ((whole, 7), (whole + " ", None)):
        assert extract_integer(text, strict=True) == number
        assert Format({"form": "boxed"}).score(turns(text)).value == (number is not None)
        result = Aime({"wrong_score": -1.0, "format_score": 0.5}).score(turns(text.replace("7", "8")))
        assert result.value == (0.5 if number else -1.0)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (r"\boxed{6 \pmod 7}", 6),
        (r"\boxed{7 \pmod 7}", None),
        (r"\boxed{42 \pmod{1000}}", 42),
        ("The remainder is 42 (mod 1000).", 42),
        (r"\boxed{7}. Wait, that is wrong: it is 8.", None),
        (r"\boxed{7}. It is 7.", 7),
    ],
)
def test_a_remainder_is_smaller_than_its_modulus(text, number):
    assert extract_integer(text, strict=False) == number
    assert aime.canonical(text) == (None if number is None else str(number))


def test_a_remainder_needs_a_box_if_told_so():
    assert aime.canonical("It is 042.") == "42"
    assert aime.canonical("It is 042.", strict=True) is None
    assert aime.canonical("It is 4200.") is None
    assert Aime({"strict": True}).config == {"strict": True}


def test_only_the_beginning_of_a_stated_answer_is_read():
    assert stated_number("so " * 99 + "  7") == 7
    assert stated_number("so " * 99 + "   7") is None


def test_only_a_short_response_is_a_number_in_words():
    assert concluding_number("so " * 19 + "six") == 6
    assert concluding_number("so " * 20 + "six") is None


def test_only_a_short_line_is_several_values():
    line = f"18 {'a' * 15} {'a' * 15} 19 {'b' * 15} {'b' * 6}"
    assert len(line) == 60
    assert concluding_number(line) is None
    assert concluding_number(line + "b") == 19


@pytest.mark.parametrize("sign", "\u2190\u2192\u21d2\u21ff\u27f0\u27ff")
def test_an_arrow_changes_no_number(sign):
    assert stated_number(f"7 {sign}") == 7


@pytest.mark.parametrize("sign", "\u2200\u2207\u2980\u27e0¬‰")
def test_a_mathematical_sign_changes_its_number(sign):
    assert stated_number(f"7 {sign}") is None


def test_headings_before_an_answer_are_skipped_a_few_times():
    headings = "#### Step 2: think\n"
    assert extract_answer("#### 7\n" + headings * 5, strict=True) == 7
    assert extract_answer("#### 7\n" + headings * 25, strict=True) is None


def test_the_form_counts_unless_told_otherwise():
    task = make_task("q", "72")
    assert Gsm8k().score(attempted(task, "The answer is 72.")).value == 0.0
    assert Gsm8k().score(attempted(task, "#### 72")).value == 1.0
    assert canonical("#### 72") == "72"
    assert canonical("none") is None


def test_each_tag_stands_once():
    right = "<think>a</think> <answer>1</answer>"
    assert is_think_answer(right) is True
    for wrong in (
        right + "<answer></answer>",
        right.replace("<think>", ""),
        "x" + right,
        right + "x",
        right.replace(" <", "x<"),
        right.replace("1", " "),
    ):
        assert is_think_answer(wrong) is False


def turns(*texts: str) -> Attempted:
    return attempted(make_task("q", "1"), *(Message("assistant", text, ()) for text in texts))


def test_the_form_of_the_last_turn_or_of_every_turn():
    last, every = (Format({"pattern": "a+", "of": of}) for of in ("answer", "every_turn"))
    assert last.score(turns("a")).value == every.score(turns("a")).value == 1.0
    assert last.score(turns("b", "a")).value == 1.0
    assert every.score(turns("b", "a")).value == last.score(turns("a", "b")).value == 0.0
    assert last.failed(turns("a")).value == 0.0
    assert (last.runs_in, last.max_answer_cpu_s) == ("process", 2)
    inline = Format({"form": "boxed"})
    assert (inline.runs_in, inline.max_answer_cpu_s) == ("inline", None)


def test_a_pattern_that_backtracks_does_not_match():
    assert Format({"pattern": "(a+)+b"}).score(turns("a" * 40)).value == 0.0


def test_a_pattern_may_take_a_tenth_of_a_second():
    assert Format({"pattern": "(?:a|b|c)*"}).score(turns("abc" * 300_000)).value == 1.0
