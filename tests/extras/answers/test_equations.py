"""Equations in an answer: which are false, which have a result, and which say nothing."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from agentrl.extras.answers.equations import (
    MAX_BITS,
    MAX_CHARS,
    MAX_TOKENS,
    is_false,
    is_no_result,
    worked_out,
)
from agentrl.extras.answers.numbers import numbers_in

WORKED_OUT = [
    ("16 - 3 = 13", 13),
    ("18 = 9 * 2", 18),
    ("2 * (16 - 7) = 18", 18),
    ("(16 - 7) * 2 = 18", 18),
    ("2(3 + 4) = 14", 14),
    ("3 + 15 = 18 = 9 * 2", 18),
    ("3 + 15 = 2 * 9", 18),
    ("18 = 3 + 15 = 9 * 2", 18),
    ("((3)) = 3", 3),
    ("-(3) + 5 = 2", 2),
    ("+(3) - 5 = -2", -2),
    ("3 * -2 = -6", -6),
    ("20 -2 = 18", 18),
    ("20 +2 = 22", 22),
    ("(20) -2 = 18", 18),
    ("-2 + 20 = 18", 18),
    ("0 / (3) = 0", 0),
    ("3 - 3 + 5 = 5", 5),
    ("0 * 3 + 5 = 5", 5),
    ("12 / (3) / (2) = 2", 2),
    ("2 - 3 - 4 = -5", -5),
    ("2 + 3 * 4 = 14", 14),
    ("20 / 3 = 6.67", Fraction("6.67")),
    ("20 / 3 = 6.66", Fraction("6.66")),
    ("20 / 3 = 6.7", Fraction("6.7")),
    ("20 / 3 = 7", 7),
    ("20 / 3 = 6.7 million", 6_700_000),
    ("20 / 3 ≈ 7.3", Fraction("7.3")),
    ("7 / 2 ≈ 3.85", Fraction("3.85")),
    ("7 / 2 ≈ 3.15", Fraction("3.15")),
    ("2.5 * 2.5 = 6.2", Fraction("6.2")),
    ("2.5 * 2.5 = 6.3", Fraction("6.3")),
    ("37 + .5 = 37 + 1.25", Fraction("38.25")),
    ("37 + .5 ≈ 37 + 4.25", Fraction("41.25")),
    ("50.5 + 50 = 51 + 51", 102),
    ("50 + 50 = 51 + 50.5", Fraction("101.5")),
    ("20% of 50 = 10", 10),
    ("50 * 20% = 10", 10),
    ("20% * 50 = 1000", 1000),
    ("3/4 of 24 = 18", 18),
    ("2% of 50 = 1", 1),
    ("1/4 = 25%", 25),
    ("25 = 25%", 25),
    ("120 - 60 = 60 million", 60_000_000),
    ("3 million + 4 million = 7 million", 7_000_000),
    ("3 apples + 4 apples = 7 apples", 7),
    ("3 big apples + 4 red apples = 7 apples", 7),
    ("3 + 4, 5 + 5 = 10", 10),
    ("5 + 5 = 10. 3 + 4 = 7", 7),
    ("5 + 5 = 10 so 3 + 4 = 7", 7),
    ("2 x 3 = 6", 6),
    ("2×3 = 6", 6),
    ("2 · 3 = 6", 6),
    ("2 times 3 = 6", 6),
    ("2 multiplied by 3 = 6", 6),
    ("6 divided by 3 = 2", 2),
    ("2 plus 3 = 5", 5),
    ("5 minus 3 = 2", 2),
    ("2^3 = 8", 8),
    ("12^{2} = 144", 144),
    ("3 + 4 equals 7", 7),
    ("3 + 4 is 7", 7),
    ("3 + 4 makes 7", 7),
    ("3 + 4 gives 7", 7),
    ("$3 + $4 = $7", 7),
    ("20% of 50.5 = 10.1", Fraction("10.1")),
    ("0% + 20% of 50.5 = 10.10", Fraction("10.1")),
    ("0 million + 3 million = 3", 3),
    ("2 times 3 = 2 * 3", 6),
    ("669 / 1000 = .66", Fraction("0.66")),
]


@pytest.mark.parametrize(("line", "value"), WORKED_OUT)
def test_a_sum_has_its_result(line, value):
    assert worked_out(line) == value
    assert is_false(line) is False


FALSE = [
    "17 = 18",
    "3 = 4",
    "16 - 3 = 14",
    "16 -3 = 14",
    "16 - 3 = 19",
    "3 + 4 = 7 = 8",
    "3 = 3 = 4",
    "5 + 5 = 10. 3 + 4 = 8",
    "5 + 5 = 11. 3 + 4 = 7",
    "5 + 5 = 10 so 3 + 4 = 8",
    "20 / 3 = 6.65",
    "20 / 3 = 6.68",
    "20 / 3 = 5",
    "20 / 3 = 8",
    "5 / 4 = 3",
    "7 / 2 = 3.6",
    "7 / 2 ≈ 3.86",
    "7 / 2 ≈ 3.14",
    "2.5 * 2.5 = 6.4",
    "2.5 * 2.5 = 6.24",
    "37 + .5 = 37 + 1.26",
    "37 + .5 ≈ 37 + 4.26",
    "3 + 3 = 4 + 3",
    "50 + 50 = 51 + 50",
    "20% of 50 = 11",
    "3/4 of 24 = 19",
    "120 - 60 = 61 million",
    "3 apples + 4 apples = 8 apples",
    "3 hours + 4 hours = 8 hours",
    "3 feet + 3 feet = 1 yard",
    "she has 3 + 4 = 8",
    "so she has 3 * 4 = 8 apples left over",
    "3 + 4 = 8 big red apples are good",
    "2 x 3 = 7",
    "2 times 3 = 7",
    "2 multiplied by 3 = 7",
    "6 divided by 3 = 3",
    "2 plus 3 = 6",
    "5 minus 3 = 3",
    "2^3 = 9",
    "3! = 7",
    "3 + 4 equals 8",
    "3 + 4 is 8",
    "3 + 4 makes 8",
    "3 + 4 gives 8",
    "2(3 + 4) = 15",
    "3 + 4 = 8, and x = 3",
    "she has 3 + 4 = 8 =",
    "3 + 4 = 8 apples are good. Yes",
    "3 feet = 1 yard. 3 + 4 = 8",
    "3 mn + 4 mn = 8 mn",
    "3M, 1 + 1 = 3",
    "20 / 3 = 6.65 apples",
    "2 / 3 = .65",
    "1 = 25%",
    "0.25 = 25.50%",
]


@pytest.mark.parametrize("line", FALSE)
def test_a_false_equation_has_no_result(line):
    assert is_false(line) is True
    assert worked_out(line) is None


SAYS_NOTHING = [
    "",
    "18",
    "3 + 4",
    "= 18",
    "18 =",
    "x = 18",
    "2x = 18",
    "18 = x",
    "3 + = 4",
    "3 4 = 8",
    "(3 = 4",
    "3) = 4",
    "() = 4",
    "3 + 4 = 8 + x",
    "3 + 4 = 8 apples x",
    "x 3 + 4 = 8",
    "she has 7 = 8",
    "she has (3 = 8",
    "3 is 4",
    "3 feet = 1 yard",
    "3 big feet = 1 yard",
    "1 hour = 60 minutes",
    "1 hour + 30 minutes = 31 minutes",
    "30 minutes + 1 hour = 31 hours",
    "3 / 0 = 4",
    "3 / (1 - 1) = 4",
    "5 of 25 = 126",
    "1 of 10 = 11",
    "30 + 30 = 70M",
    "3 mod 2 = 4",
    "3 + ... = 4",
    "3 + 4 = x = 8",
    "3 + 4 = she has 5 = 8",
    "3 + 4? = 8",
    "3 * = 4",
    "3 * x = 4",
    "* 3 = 4",
    "3 + * 4 = 8",
    "3 + 4 = she has 5 + 2 = 8",
    "= she has 3 + 4 = 8",
    "3 + 4 = 8 apples are good = x",
    "3 + 4 = 8 apples are more + 2 big red pears",
    "3k + 1 = 5",
    "1 + 1 3M = 3",
    "3/0 + 4 = 5 + 1",
    "(5) of 20 = 101",
    "1 + 1 = = 3",
]


@pytest.mark.parametrize("line", SAYS_NOTHING)
def test_what_cannot_be_evaluated_is_trusted(line):
    assert is_false(line) is False
    assert worked_out(line) is None


@pytest.mark.parametrize(
    "line",
    [
        "18 = 18",
        "18 = 18 = 18",
        "$18 = 18",
        "she has 3 + 4 = 7. 5 + 5 = 10",
        "she has 3 + 4 = 7",
        "3 + 4 = 7 apples, x = 3",
    ],
)
def test_true_equations_without_a_result(line):
    """A number is no result of itself, and a sum in a sentence is no result of the line."""
    assert is_false(line) is False
    assert worked_out(line) is None


@pytest.mark.parametrize("of", range(20))
def test_factorials(of):
    assert worked_out(f"{of}! = {math.factorial(of)}") == math.factorial(of)
    assert is_false(f"{of}! = {math.factorial(of) + 1}")


def test_a_factorial_of_twenty_is_not_worked_out():
    assert not is_false("20! = 7")


def test_a_long_line_is_read_from_its_end():
    false = "16 - 3 = 14"
    assert is_false(false.rjust(20_000)) is is_false(false.ljust(MAX_CHARS)) is True
    assert is_false(false.ljust(MAX_CHARS + len(false))) is is_false(false.ljust(20_000)) is False
    assert is_false("16 - 3 = 13".ljust(MAX_CHARS)) is False, "16, not 6"
    assert is_false("116 - 3 = 13".ljust(MAX_CHARS + 1)) is False, "16, not 116"
    assert worked_out("16 - 3 = 13".rjust(MAX_CHARS)) == 13
    assert worked_out("16 - 3 = 13".rjust(MAX_CHARS + 1)) is None


def test_a_long_sum_is_not_worked_out():
    def line(num_ones: int, *more: str) -> str:
        return " + ".join(["1"] * num_ones + [*more]) + f" = {num_ones + len(more)}"

    with_brackets = line(37, "(1)")  # 79 tokens
    assert worked_out(with_brackets) == worked_out(f"{with_brackets} pears") == 38
    assert worked_out(f"{with_brackets} ripe pears") is None
    assert worked_out(line(39)) == 39
    assert worked_out(line(40)) is None
    assert not is_false("3 + 4 = 8, " + "1 + " * 37 + "1"), f"more than {MAX_TOKENS} tokens"
    assert is_false("3 + 4 = 8, " + "1 + " * 36 + "1")


def test_large_numbers_are_not_worked_out():
    large = 9999**9
    fitting = MAX_BITS // large.bit_length()
    assert is_false(" * ".join(["9999^9"] * fitting) + " = 1")
    assert not is_false(" * ".join(["9999^9"] * (fitting + 1)) + " = 1")
    assert not is_false(" / ".join(["1", *["(9999^9)"] * (fitting + 1)]) + " = 1")
    largest = " * ".join(["8192^9"] * 8 + ["128^9"])  # 2^999
    assert is_false(f"{largest} = 1")
    assert not is_false(f"{largest} * 2 = 1")
    assert not is_false(f"{largest} + {largest} = 1")


@pytest.mark.parametrize(
    ("line", "end", "expected"),
    [
        ("18 = 18", 1, True),
        ("18=18", 1, True),
        ("18 = 18.", 1, True),
        ("18 = 18", 0, False),
        ("18 = 18.0", 1, False),
        ("25 = 25%", 1, False),
        ("3 = 18", 1, True),
        ("so, 18 = 18", 1, True),
        ("x 18 = 18", 1, False),
        ("18 + 18", 1, False),
        ("5, 18 = 18", 2, True),
        ("5, 18 = 18", 1, False),
        ("5 = 18 = 18", 2, True),
        ("3 + 15 = 18", 2, False),
    ],
)
def test_two_equal_numbers_are_no_result(line, end, expected):
    assert is_no_result(line, numbers_in(line), end) is expected
