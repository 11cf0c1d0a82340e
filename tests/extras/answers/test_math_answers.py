r"""The reward `math`: which part of a response is its answer, with and without a box."""

from __future__ import annotations

import pytest

from agentrl.errors import ConfigError, DataError, RewardError
from agentrl.extras.answers.boxed import MAX_MARKED_CHARS
from agentrl.extras.answers.expressions import MAX_ANSWER_CHARS
from agentrl.extras.answers.math import MAX_DETAIL_CHARS, Math, canonical
from agentrl.plugins import RewardResult
from agentrl.types import Message, ToolCall
from parts.trajectories import attempted, make_task

GRADED = Math({"strict": False, "format_score": 0.25, "wrong_score": -1.0})


def read(text: str, truth: object, *calls: ToolCall, reward: Math = GRADED) -> RewardResult:
    return reward.score(attempted(make_task("q", truth), Message("assistant", text, calls)))


def verdict(text: str, truth: object) -> str:
    metrics = read(text, truth).metrics
    return {(1.0, 1.0): "strict", (0.0, 1.0): "flexible", (0.0, 0.0): "wrong"}[
        metrics["accuracy_strict"], metrics["accuracy_flexible"]
    ]


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        # a box counts, whatever else there is
        (r"It is \boxed{x+1}.", "1+x", "strict"),
        (r"It is \boxed{x+2}, not x+1. The answer is x+1.", "1+x", "wrong"),
        (r"It is \boxed{5}. Wait, that is wrong: it is 6.", "5", "wrong"),
        (r"\boxed{5 = 5}", "5", "wrong"),
        (r"\boxed{}", "5", "wrong"),
        # words, if the truth is words
        ("The answer is blue, because it is.", "blue", "flexible"),
        ("The answer is red, because it is.", "blue", "wrong"),
        ("The answer is (C).", "C", "flexible"),
        # the answer alone
        ("x+1", "1+x", "flexible"),
        ("*x+1*.", "1+x", "flexible"),
        ("x+2", "1+x", "wrong"),
        (r"\sqrt{8}", r"2\sqrt{2}", "flexible"),
        ("blue", "blue", "flexible"),
        # what is called the answer
        (r"The answer is $x+1$.", "1+x", "flexible"),
        (r"The answer is not $x+1$.", "1+x", "wrong"),
        (r"The answer is at least $x+1$.", "1+x", "wrong"),
        (r"The answer is at least $5$.", "5", "wrong"),
        ("The answer is not 5.", "5", "wrong"),
        ("The answer is at most 5.", "5", "wrong"),
        # the last expression
        (r"First $x$, then $x+1$.", "1+x", "flexible"),
        (r"First $x+1$, then $x$.", "1+x", "wrong"),
        (r"First $1$, second $2$, then $x > 5$.", "x > 5", "flexible"),
        (r"So we get $5 = 5$.", "5", "wrong"),
        (r"So we get $2 + 3 = 5$.", "5", "flexible"),
        (r"So we get \(x+1\).", "1+x", "flexible"),
        # plain words
        ("So we get 5 apples.", "5", "flexible"),
        ("So we get 6 apples.", "5", "wrong"),
        ("So y is x+1.", "1+x", "flexible"),
        ("So y is x+2.", "1+x", "wrong"),
        ("So y is sqrt(8).", r"2\sqrt{2}", "flexible"),
        ("So there is nothing to", "5", "wrong"),
        ("So y is", "1+x", "wrong"),
        ("", "5", "wrong"),
        # a costly answer is a wrong one
        (r"\boxed{9^{9^{9^{9}}}}", "5", "wrong"),
        (r"So we get $9^{9^{9^{9}}}$.", "5", "wrong"),
        # a truth may be a whole solution, or a number
        (r"\boxed{5}", 5, "strict"),
        (r"\boxed{2.5}", 2.5, "strict"),
        (r"\boxed{5}", "$5$", "strict"),
        (r"\boxed{5}", r"So \boxed{4}, no, \boxed{ 5 }.", "strict"),
    ],
)
def test_the_answer_of_a_response(text, truth, expected):
    assert verdict(text, truth) == expected


@pytest.mark.parametrize(
    ("text", "value", "answer"),
    [
        (r"So \boxed{5}.", 1.0, "5"),
        (r"So \boxed{x+1}.", 0.25, "x + 1"),
        ("So we get 5.", 1.0, "5"),
        ("So we get 6.", -1.0, "6"),
        (r"So we get $x+1$.", -1.0, "x + 1"),
        (r"First $x$ and $y$, then $x+1$.", -1.0, "x + 1"),
        ("The answer is not 5.", -1.0, None),
        ("So nothing", -1.0, "so nothing"),
        (r"\boxed{5}. Wait, that is wrong: it is 6.", 0.25, None),
    ],
)
def test_values_and_details(text, value, answer):
    result = read(text, "5")
    assert (result.value, dict(result.details)) == (value, {"answer": answer})


def test_the_score_of_an_answer_that_ends_its_process():
    strict = Math({"strict": True, "format_score": 0.25, "wrong_score": -1.0})
    for reward in (GRADED, strict):
        for text, value in ((r"\boxed{5}", 0.25), (r"\boxed{5}" + "x " * 15_000, -1.0), ("5", -1.0)):
            result = reward.failed(attempted(make_task("q", "5"), text))
            assert isinstance(result, RewardResult)
            assert (result.value, result.details["answer"]) == (value, None)
            assert result.metrics["accuracy_strict"] == result.metrics["accuracy_flexible"] == 0.0
    assert Math.max_answer_cpu_s == 2


@pytest.mark.parametrize(
    ("handed_in", "truth", "expected"),
    [
        ("x+1", "1+x", 1.0),
        ("x+2", "1+x", 0.0),
        ("It is $x+1$", "1+x", 1.0),
        (r"\boxed{x+1}", "1+x", 1.0),
        ("x+1" + "+0" * 60, "1+x", 1.0),
    ],
)
def test_what_is_handed_in_needs_no_box(handed_in, truth, expected):
    metrics = read("", truth, ToolCall("1", "finish", {"answer": handed_in})).metrics
    assert metrics["accuracy_strict"] == metrics["accuracy_flexible"] == expected


def test_how_far_an_answer_is_searched():
    blah = "blah "
    assert verdict(r"\boxed{5} " + blah * 1500, "5") == "strict"
    assert verdict(r"\boxed{5} " + blah * 4500, "5") == "wrong"
    whole = r"\boxed{5}".ljust(MAX_MARKED_CHARS)
    assert verdict(whole, "5") == "strict"
    assert verdict(whole + " ", "5") == "wrong"
    assert canonical(whole, strict=True) == "5"
    assert GRADED.failed(attempted(make_task("q", "5"), whole)).value == 0.25
    assert verdict("The answer is blue. " + blah * 500, "blue") == "flexible"
    assert verdict("The answer is blue. " + blah * 1500, "blue") == "wrong"
    assert canonical(r"\boxed{5} " + blah * 1500) == "5"
    assert canonical(r"\boxed{5} " + blah * 4500, strict=True) is None
    assert canonical("The answer is blue. " + blah * 300) == "blue"


def test_how_long_an_answer_may_be():
    spaces = r"\," * (MAX_ANSWER_CHARS // 2 - 1)
    assert verdict(rf"\boxed{{05{spaces}}}", "5") == "strict"
    assert verdict(rf"\boxed{{005{spaces}}}", "5") == "wrong"
    words = "a " * 140 + "b"
    assert canonical(rf"\boxed{{{words}}}") == words[:MAX_DETAIL_CHARS]
    assert canonical(f"So we get ${'x+' * 90}x$.") == ("x + " * 100)[:MAX_DETAIL_CHARS]
    assert canonical(f"So we get ${'x+' * 120}x$.") == ("x+" * 100)[:MAX_DETAIL_CHARS]  # as written
    assert verdict("x+1" + "+0" * 48 + "+", "1+x") == "wrong"


@pytest.mark.parametrize(
    ("text", "strict", "form"),
    [
        (r"So \boxed{5.0}", True, "5"),
        (r"So \boxed{5.0}", False, "5"),
        (r"So \boxed{}", False, None),
        ("5.0", True, None),
        ("5.0", False, "5"),
        ("yes", False, "yes"),
        ("x+1", False, "x + 1"),
        ("The answer is (C), because it is.", False, "c"),
        ("So we get $x+1$ or so.", False, "x + 1"),
        ("First we get $x$, then $y$, then $x+1$.", False, "x + 1"),
        (r"So we get $9^{9^{9^{9}}}$.", False, None),
        (r"<think>\boxed{4}</think> \boxed{5}", False, "5"),
    ],
)
def test_the_canonical_answer(text, strict, form):
    assert canonical(text, strict=strict) == form


def test_by_default_no_box_is_needed():
    assert canonical("5.0") == "5"
    assert read("So we get 5.", "5", reward=Math()).value == 1.0
    assert read("So we get 6.", "5", reward=Math()).value == 0.0


@pytest.mark.parametrize("truth", [None, "", True, ["5"], "  ", r"\boxed{}"])
def test_a_truth_is_an_expression(truth):
    with pytest.raises(DataError, match="needs an expression"):
        Math().check(make_task("q", truth))
    with pytest.raises(RewardError, match="is not a mathematical expression"):
        read(r"\boxed{5}", truth)


def test_a_truth_that_does_not_equal_itself_is_nobodys_answer():
    with pytest.raises(RewardError, match="does not equal itself"):
        read(r"\boxed{5}", r"\text{}")


def test_wrong_options_and_tolerances_are_told():
    with pytest.raises(ConfigError, match="reward 'math'"):
        Math({"stict": True})
    assert Math({"strict": True}).config == {"strict": True}
    with pytest.raises(DataError, match=r"extra_info\.tolerance=2"):
        Math().check(make_task("q", "2.5", extra_info={"tolerance": 2}))
