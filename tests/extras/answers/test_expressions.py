r"""Mathematical answers as they are written: which are equal, which state no value, which are words."""

from __future__ import annotations

from fractions import Fraction

import pytest

from agentrl.errors import RewardError
from agentrl.extras.answers.bounds import MAX_CHARS
from agentrl.extras.answers.cpu_limit import TooCostlyError
from agentrl.extras.answers.expressions import (
    canonical,
    canonical_expression,
    equal,
    is_relation_only,
    is_text,
    number_of,
    opens_with_bound,
    parse_box_of_truth,
    parse_boxed,
    parse_prose,
    rehearse,
    stated_plainly,
    stated_text,
)

TOWER = "9^{9^{9^{9}}}"


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("5", "5", True),
        ("5", "6", False),
        ("-5", "5", False),
        ("5.0", "5", True),
        ("05", "5", True),
        ("2.52", "2.5", False),
        # a percentage may be a share, if it cannot be mistaken
        (r"50\%", "50", True),
        (r"50\%", "0.5", True),
        ("50", r"50\%", True),
        ("0.5", r"50\%", True),
        ("5000", r"50\%", False),
        (r"0.5\%", "0.5", False),
        ("0.5", r"0.5\%", False),
        ("0.005", r"0.5\%", True),
        (r"0.5\%", "0.005", True),
        (r"1\%", "1", True),
        ("1", r"1\%", True),
        ("0.01", r"1\%", True),
        (r"0\%", "0", True),
        (r"-1\%", "-1", True),
        (r"50\%", r"50\%", True),
        (r"50\%", r"0.5\%", False),
        # names, units and words
        ("x=5", "5", True),
        ("5", "x=5", True),
        ("x=5", "x=5", True),
        ("x=5", "y=5", False),
        (r"x=5\text{ cm}", "5", True),
        (r"P(A) = \frac12", "0.5", True),
        (r"\text{5 apples}", "5", True),
        ("5", r"\text{5 apples}", True),
        ("6", r"\text{5 apples}", False),
        (r"\text{five}", "5", True),
        ("5", r"\text{five}", True),
        (r"\text{5 or 6}", "5", False),
        (r"\text{5 apples 6}", "5", False),
        (r"\text{about 5}", "5", False),
        (r"\text{5 apples}", "0.05", False),
        (r"x = 50\%", "0.5", True),
        (r"x = 5\text{ thousand}", "5000", True),
        (r"\text{the answer is }x+1", "1+x", True),
        (r"\phantom{x}P(X) = x+1", "1+x", True),
        (r"5\text{ thousand}", "5000", True),
        (r"5\text{ thousand}", "5", False),
        (r"\text{the answer is }5", "5", True),
        (r"\text{the answer is 5}", "5", True),
        (r"\text{Answer: }\frac12", "1/2", True),
        (r"\text{option: }\text{it is }C", "C", True),
        (r"\text{yes}", "yes", True),
        (r"\text{yes}", r"\text{no}", False),
        (r"\text{abc}", "acb", False),  # not the product of a, b and c
        ("yes", "no", False),
        ("ab", "ba", True),  # a product
        ("", "", False),
        (r"\text{}", "5", False),
        ("(C)", "C", True),
        (r"\text{(C)}", "C", True),
        (r"\text{C}", "D", False),
        ("1, 2", r"1 \text{ and } 2", True),
        # numbers in a base
        ("1101_2", "1101_2", True),
        ("1101_{2}", r"1101_{two}", True),
        (r"1101_{\text{two}}", "1101_2", True),
        ("1101", "1101_2", True),
        ("1100", "1101_2", False),
        ("1100_2", "1101_2", False),
        ("1101_3", "1101_2", False),
        ("2_2", "1101_2", False),
        ("1101_2", "1101", False),
        ("1101_2", "13", False),
        ("A3_{16}", "A3_{16}", True),
        ("x_2", "1101_2", False),
        ("1101_2", "x", False),
        # ratios
        (r"3 \text{ to } 4", "3:4", True),
        (r"3\colon 4", "3:4", True),
        (r"\frac{3}{4}", "3:4", True),
        ("3:5", "3:4", False),
        # plain text has one sign for all functions and one for all roots
        (r"\log 2", r"\log 3", False),
        (r"\log 2", r"\ln 2", False),
        (r"\sin x", r"\cos x", False),
        (r"\log_2 8", r"\log_2 8", True),
        (r"\sqrt[3]{8}", r"\sqrt{8}", False),
        (r"\sqrt {8}", r"\sqrt{8}", True),
        # two values
        (r"5 \pm 1", "5", False),
        (r"5 \pm 0", "5", False),
        (r"\pm 5", r"\pm 5", True),
        ("5,-5", r"\pm 5", True),
        (r"\pm 5", r"\{5, -5\}", True),
        # repeating decimals
        (r"0.\overline{3}", r"\frac{1}{3}", True),
        (r".\overline{3}", "1/3", True),
        (r"0.1\overline{6}", r"\frac{1}{6}", True),
        (r"0.12\overline{34}", r"\frac{611}{4950}", True),
        (r"1.2\overline{34}", r"\frac{611}{495}", True),
        (r"0.\overline{3}", r"\frac{3}{10}", False),
        # how it is written
        (r"\phantom{x}5", "5", True),
        (r"\{x : x > 5\}", "x > 5", True),
        (r"{3 \over 4}", r"\frac34", True),
        (r"\frac\pi2", r"\frac{\pi}{2}", True),
        (r"\sin 30^\circ", r"\frac12", True),
        ("30°", "30", True),
        ("√2", r"\sqrt2", True),
        ("√(2)", r"\sqrt{2}", True),
        ("4i", "4 i", True),
        (r"1\,234", "1234", True),
        (r"5x \text{ for all } x", "5x", True),
        ("x(x+1)", "x^2 + x", True),
        ("x(x+1).", "x^2 + x", True),
    ],
)
def test_equal_answers(answer, truth, expected):
    assert equal(answer, truth) is expected


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("2.52", "2.5", True),
        ("2.525", "2.5", True),
        ("2.475", "2.5", True),
        ("2.526", "2.5", False),
        ("-2.5", "2.5", False),
        (r"50.5\%", "0.5", True),
        (r"51\%", "0.5", False),
        ("251", "250", False),
        ("251", "250.0", False),
        ("2.52", r"\frac{5}{2}", False),
        (r"2.52\sqrt{1}", "2.5", True),
        (r"\sqrt{6.35}", "2.5", True),
    ],
)
def test_a_tolerance_is_for_decimals(answer, truth, expected):
    assert equal(answer, truth, tolerance=0.01) is expected


@pytest.mark.parametrize(
    "text", ["5 apples", "(5", "5 6", "5,6", "5x", "1/0", "1,5", "five", "half", "", "$"]
)
def test_what_is_no_number(text):
    assert number_of(text) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5", 5),
        ("5.", 5),
        ("$5$", 5),
        (r"\$5", 5),
        ("-5", -5),
        ("1,234", 1234),
        ("1 1/2", Fraction(3, 2)),
        ("x=5", 5),
        ("x_1 = 5", 5),
        (r"5\text{ cm}^2", 5),
        (r"30^\circ", 30),
        ("30 degrees", 30),
        ("5 dollars", 5),
        (r"50\%", 50),
        (r"50 \text{ percent}", 50),
        (r"50\text{\%}", 50),
        (r"0.\overline{3}", Fraction(1, 3)),
    ],
)
def test_what_is_a_number(text, number):
    assert number_of(text) == number


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("5", "5", False),
        ("x = 5", "5", False),
        ("2+3 = 5", "5", False),
        ("5 = 5", "5", True),
        ("$5$ = $5$", "5", True),
        ("x = 5 = 5", "5", True),
        ("5'", "5", True),
        (r"5^{\prime}", "5", True),
        ("5'", "5'", False),
        ("5", "5'", False),
        ("5 (or 6)", "5", True),
        ("5 (or 5)", "5", False),
        ("5 (or 5, 6)", "5", True),
        ("5 (or 4, 5)", "5", True),
        (r"0.5 (or 50\%)", "0.5", False),
        (r"0.5 (or 51\%)", "0.5", True),
        ("x (or 6)", "x", False),
        (r"\text{less than }5", "5", True),
        (r"\text{less than }5", r"\text{less than }5", False),
        ("5", r"\text{less than }5", False),
        (r"\text{not }5", "5", True),
        (r"5, \ldots", "5", True),
        (r"1, 2, \ldots", r"1,2,\ldots", False),
    ],
)
def test_an_answer_that_is_no_value(answer, truth, expected):
    assert is_relation_only(answer, truth) is expected


@pytest.mark.parametrize(
    ("phrase", "truth", "expected"),
    [
        ("at least 2", "2", True),
        ("Between 2 and 3", "2", True),
        ("at least 2", "at least 2", False),
        ("2", "2", False),
        ("2", "at least 2", False),
        ("2, or at least 3", "2", False),
    ],
)
def test_a_bound_is_no_answer_unless_asked_for(phrase, truth, expected):
    assert opens_with_bound(phrase, truth) is expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The answer is (C), because (D) is wrong.", "C"),
        ("The answer is option B: 5", "B"),
        ("The answer is C or D.", "C or D."),
        ("The answer is $(A), (B)$", "(A), (B)"),
        ("The answer is blue because it is.", "blue"),
        ("The answer is blue, not red.", "blue"),
        ("The answer is red; I checked, not blue, which is.", "red"),
        ("The answer is $blue$.", "blue"),
        ("The answer is yes. The answer is 5x+1.", "yes"),
        ("The answer is 5x.", None),
        ("It is so.", None),
    ],
)
def test_the_words_that_are_called_the_answer(text, words):
    assert stated_text(text) == words


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("The answer is 5x. I hope.", "5x"),
        ("The answer is 3! I am sure. Yes.", "3"),
        ("The answer is sqrt(3)", r"\sqrt{3}"),
        ("So y is 2x.", "2x"),
        ("So y = 2x", "2x"),
        ("It is 3\nSo y is 2x = 4x", "4x"),
        ("x is 1\ny is 2\nz is 3", "3"),
        ("y is 3\n\n", "3"),
        ("So it is 3.5; done", "3.5"),
        ("It is π", r"\pi"),
        ("It is √2.", r"\sqrt2"),
        ("So y is", None),
        ("", None),
    ],
)
def test_what_plain_words_conclude(text, stated):
    assert stated_plainly(text) == stated


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("yes", True),
        ("(C)", True),
        ("a,b", True),
        ("The cat", True),
        ("red, green and blue", True),
        (r"\text{red}", True),
        ("3:45", True),
        ("5", False),
        ("x+1", False),
        ("", False),
    ],
)
def test_what_is_text(answer, expected):
    assert is_text(answer) is expected


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        ("5.0", "5"),
        (r"50\%", "50"),
        (r"\frac{1}{2}", "1/2"),
        ("Yes.", "yes"),
        ("(C)", "c"),
        (r"\text{red and blue}", "red,blue"),
        ("x=5", "5"),
        ("x  +  1", "x + 1"),
        ("x(x+1)", r"x \left(x + 1\right)"),
        (r"\dfrac{2x}{4}", r"\frac{2 x}{4}"),
        ("(1,2)", r"\left(1, 2\right)"),
        (r"\left\{2,1\right\}", r"\left\{1, 2\right\}"),
        ("2  +  3^{2", "2 + 3^{2"),
        (TOWER, TOWER),
        (TOWER + "  + 1", TOWER + " + 1"),
        ("", None),
        ("  ", None),
    ],
)
def test_equal_answers_have_one_form(answer, form):
    assert canonical(answer) == form
    assert form is None or canonical(form) == form


def test_the_form_of_a_parsed_answer():
    parsed = parse_boxed(r"\dfrac{2x}{4}")
    assert canonical_expression(parsed, "2x  /4") == r"\frac{2 x}{4}"
    assert canonical_expression(parsed, "5.0") == "5"
    assert canonical_expression(parse_boxed("5"), "five  +  0") == "5"
    assert canonical_expression((), "2x  /4") == "2x /4"
    assert canonical_expression(("2x /4",), "2x  /4") == "2x /4"
    with pytest.raises(TooCostlyError):
        canonical_expression(parse_boxed("2^{99999}"), "2^{99999}")


def test_what_is_too_long_or_too_costly_is_not_parsed():
    longest = ("1+" * MAX_CHARS)[: MAX_CHARS - 1] + "1"
    assert parse_boxed(longest[-MAX_CHARS:].replace("1", "x").lstrip("+"))
    for text in ("1+" * MAX_CHARS + "1", " " * MAX_CHARS + "1", TOWER):
        with pytest.raises(TooCostlyError):
            parse_boxed(text)
    with pytest.raises(TooCostlyError):
        parse_prose(f"It is ${TOWER}$.")
    assert str(parse_prose("It is $x + x$.")[0]) == "x + x"
    assert parse_box_of_truth(TOWER) == parse_box_of_truth("2^{99999}") == ()
    assert str(parse_box_of_truth("x^2")[0]) == "x**2"


@pytest.mark.parametrize("truth", ["5", r"\frac12", "yes", TOWER, "x^{", r"\infty", "x > 5", "(1, 2)", "√2"])
def test_a_truth_equals_itself(truth):
    """`rehearse` raises otherwise, as the next test shows."""
    rehearse(truth)


def test_a_truth_that_does_not_equal_itself_is_told():
    with pytest.raises(RewardError, match=r"text\{\}' does not equal itself"):
        rehearse(r"\text{}")


def test_nothing_is_logged_about_the_parsers_timeouts(caplog):
    """They are off; the deadline is ours."""
    parse_boxed("x + 7719")
    assert not caplog.records
