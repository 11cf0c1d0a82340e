"""The calculator against Python's own fractions, and against expressions that would never end."""

from __future__ import annotations

from fractions import Fraction

import pytest
import trio
from agentrl.tools.calculator import MAX_BITS, Calculator, evaluate, format_number
from hypothesis import given
from hypothesis import strategies as st

from parts.cpu_time import cpu_s

BINARY = ("+", "-", "*", "/", "//", "%")


def leaves():
    integers = st.integers(0, 999).map(lambda n: (str(n), Fraction(n)))
    decimals = st.decimals(0, 99, places=2).map(lambda d: (str(d), Fraction(str(d))))
    return integers | decimals


def combine(children):
    def binary(drawn):
        (left, op, right) = drawn
        values = {
            "+": lambda a, b: a + b,
            "-": lambda a, b: a - b,
            "*": lambda a, b: a * b,
            "/": lambda a, b: a / b,
        }
        values |= {"//": lambda a, b: Fraction(a // b), "%": lambda a, b: a % b}
        try:
            return f"({left[0]} {op} {right[0]})", None if None in (left[1], right[1]) else values[op](
                left[1], right[1]
            )
        except ZeroDivisionError:
            return f"({left[0]} {op} {right[0]})", None

    negated = children.map(lambda child: (f"-{child[0]}", None if child[1] is None else -child[1]))
    return st.tuples(children, st.sampled_from(BINARY), children).map(binary) | negated


@given(st.recursive(leaves(), combine, max_leaves=8))
def test_the_value_is_the_fraction(case):
    expression, expected = case
    if len(expression) > 256:
        return
    if expected is None:
        with pytest.raises(ValueError, match="division by zero"):
            evaluate(expression)
    else:
        assert evaluate(expression) == expected


@given(st.integers(-12, 12), st.integers(-9, 9))
def test_integer_powers_are_exact(base, exponent):
    if base == 0 and exponent < 0:
        with pytest.raises(ValueError, match="division by zero"):
            evaluate(f"({base}) ** ({exponent})")
    else:
        assert evaluate(f"({base}) ** ({exponent})") == Fraction(base) ** exponent


@given(st.text(alphabet="0123456789.eE_+-*/%() x\n\0é", max_size=300))
def test_any_text_gives_an_answer_or_a_message(text):
    result = trio.run(Calculator().call, {"expression": text})
    assert result.text
    assert len(result.text) < 250
    assert "Traceback" not in result.text


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "2**-9999999",
        "(9**99)*(9**99)*(9**99)",
        "1e999",
        "1e300*1e300",
        "9" * 200,
        "(" * 200 + "1" + ")" * 200,
        "-" * 255 + "1",
        "10**0.5**-9",
    ],
)
def test_no_expression_costs_more_than_a_moment(expression):
    def check() -> None:
        try:
            value = evaluate(expression)
        except ValueError as error:
            assert str(error)  # noqa: PT017 - either is right, if it is quick
        else:
            assert max(value.numerator.bit_length(), value.denominator.bit_length()) <= MAX_BITS

    assert cpu_s(check, below=0.5) < 0.5


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("12 * 34", "408"),
        ("7/2", "3.5"),
        ("0.1 + 0.2", "0.3"),
        ("1/3", "0.3333333333"),
        ("2**0.5", "1.414213562"),
        ("10**20", "1" + "0" * 20),
        ("-7 // 2", "-4"),
    ],
)
def test_results_are_short(expression, text):
    assert format_number(evaluate(expression)) == text


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os')",
        "abs(1)",
        "1 if 2 else 3",
        "True",
        "[1]",
        "1, 2",
        "2 ^ 3",
        "",
        "1 +",
        "x",
        "(1)(2)",
        "1j",
    ],
)
def test_a_wrong_expression_is_answered_with_what_would_be_right(expression):
    result = trio.run(Calculator().call, {"expression": expression})
    assert result.is_error
    assert "use numbers" in result.text or "are supported" in result.text
