"""Numbers in words: what they mean, and which words after them say that they mean something else."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.extras.answers.answer_number import MAX_LINE_CHARS
from agentrl.extras.answers.number_words import MAX_CHARS, number_in_words

ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
SCALES = {"billion": 10**9, "million": 10**6, "thousand": 1000}


def words(number: int, joint: str = " ") -> str:
    """The English words of a number below 10^12."""
    for scale, factor in SCALES.items():
        if number >= factor:
            rest = number % factor
            return f"{words(number // factor, joint)} {scale}" + (f" {words(rest, joint)}" if rest else "")
    if number >= 100:
        rest = number % 100
        return f"{ONES[number // 100]} hundred" + (f"{joint}{words(rest)}" if rest else "")
    if number >= 20:
        return TENS[number // 10 - 2] + (f"-{ONES[number % 10]}" if number % 10 else "")
    return ONES[number]


def test_every_number_up_to_a_thousand():
    for number in range(1001):
        for text in (words(number), words(number, " and "), words(number).replace("-", " ").upper()):
            assert number_in_words(text) == number, text


@given(
    st.integers(0, 10**12 - 1),
    st.sampled_from([" ", " and "]),
    st.sampled_from(["", "the answer is ", "minus "]),
)
def test_every_number(number, joint, before):
    assert number_in_words(before + words(number, joint)) == (-number if before == "minus " else number)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("apples", None),
        ("The answer is", None),
        ("negative four", -4),
        ("minus four or five", None),
        ("minus", None),
        ("a hundred", 100),
        ("a thousand", 1000),
        ("a million", 10**6),
        ("a dozen", 12),
        ("the hundred", None),
        ("hundred", None),
        ("a apple", None),
        ("a five", 5),
        ("dozen", None),
        ("two dozen", 24),
        ("two dozen eggs", 24),
        ("half a dozen", 6),
        ("half a dozen eggs", 6),
        ("quarter of million", 250_000),
        ("half a million", 500_000),
        ("half a thousand", 500),
        ("half a billion", 500_000_000),
        ("half a pie", Fraction(1, 2)),
        ("half of pie", None),
        ("half", Fraction(1, 2)),
        ("quarter", Fraction(1, 4)),
        ("half a", Fraction(1, 2)),
        ("half pie", Fraction(1, 2)),
        ("third", None),
        ("one half", Fraction(1, 2)),
        ("three halves", Fraction(3, 2)),
        ("one third", Fraction(1, 3)),
        ("two thirds", Fraction(2, 3)),
        ("one quarter", Fraction(1, 4)),
        ("three quarters", Fraction(3, 4)),
        ("one fourth", Fraction(1, 4)),
        ("three-fourths", Fraction(3, 4)),
        ("one fifth", Fraction(1, 5)),
        ("two fifths", Fraction(2, 5)),
        ("five sixths", Fraction(5, 6)),
        ("one eighth", Fraction(1, 8)),
        ("seven eighths", Fraction(7, 8)),
        ("nine tenths", Fraction(9, 10)),
        ("ten thirds", 10),  # of ten and more, the fraction is no part of the number
        ("zero thirds", 0),
        ("nine thirds", 3),
        ("two and a half", Fraction(5, 2)),
        ("two and one half", Fraction(5, 2)),
        ("two and one third", Fraction(7, 3)),
        ("two and two thirds", Fraction(8, 3)),
        ("two and three quarters", Fraction(11, 4)),
        ("two and three quarters hours", Fraction(11, 4)),
        ("two and a pear", None),
        ("two and one", None),
        ("two and a", None),
        ("two and pears", None),
        ("two hundred and a half", Fraction(401, 2)),
        ("two thousand and a quarter", Fraction(8001, 4)),
        ("two point five", Fraction(5, 2)),
        ("two point zero five", Fraction(41, 20)),
        ("two point five dollars", Fraction(5, 2)),
        ("two point", None),
        ("two point ten", None),
        ("two point nine nine", Fraction(299, 100)),
        ("zero point one", Fraction(1, 10)),
        ("eighteen dollars and fifty cents", Fraction("18.5")),
        ("eighteen dollars fifty cents", Fraction("18.5")),
        ("one dollar and five cents", Fraction("1.05")),
        ("two pounds and ninety-nine pence", Fraction("2.99")),
        ("two euros and one cent", Fraction("2.01")),
        ("two euros and one cent or three", None),
        ("two euros and one hundred cents", None),
        ("two euros and one", None),
        ("two euros and one apple", None),
        ("two yen and one cent", None),
        ("two dollars", 2),
        ("two dollars each", 2),
        ("two dollars or so", None),
        ("two three", None),
        ("forty two", 42),
        ("forty twelve", None),
        ("forty twenty", None),
        ("ten two", None),
        ("two forty", None),
        ("one hundred forty", 140),
        ("one hundred zero", None),
        ("one hundred hundred", None),
        ("zero hundred", None),
        ("ninety-nine hundred", 9900),
        ("one thousand thousand", None),
        ("one thousand million", None),
        ("one million one thousand one", 1_001_001),
        ("one thousand and five", 1005),
        ("one million and five", None),
        ("hundred and five", None),
        ("zero thousand", None),
        ("one of them", None),
        ("six or seven", None),
        ("six to seven", None),
        ("six and pears", None),
        ("minus six seven", None),
        ("minus six or", None),
        ("minus six apples", -6),
        ("it has a total", None),
        ("a the hundred", None),
        ("two dollars and five", None),
        ("two dollars fifty cents seven", None),
        ("two dollars fifty cents each", Fraction("2.5")),
        ("two dollars fifty cents or", None),
        ("two dollars fifty cents of", None),
        ("two dollars cents", 2),
        ("half a dozen seven", None),
        ("half a dozen of", None),
        ("half seven", None),
        ("half a seven", None),
        ("half and", None),
        ("two thirds seven", None),
        ("two thirds of", None),
        ("two and a half seven", None),
        ("two and a half of", None),
        ("two point five seven eggs", Fraction("2.57")),
        ("two point five of", None),
        ("two a half", 2),
        ("zero half", None),
        ("zero five", None),
        ("one hundred thousand and ninety", 100_090),
        ("one hundred and fifty and five", None),
        ("twenty ten", None),
        ("nineteen five", None),
        ("one hundred nineteen five", None),
        ("one hundred ten", 110),
        ("one hundred twenty-one", 121),
        ("twenty-one five", None),
        ("one thousand zero", 1000),
        ("one hundred and a half", Fraction(201, 2)),
        ("one hundred and one", 101),
        ("six half", 3),
        ("six minus", None),
        ("six plus", None),
        ("six times", None),
        ("six hundredths", None),
        ("six thousandths", None),
        ("six squared", None),
        ("six cubed", None),
        ("six factorial", None),
        ("six dozens", None),
        ("six apples", 6),
        ("six apples, seven pears", None),
        ("six apples 7", None),
        ("six apples or", None),
        ("six x < y", None),
        ("six x > y", None),
        ("six x ≤ y", None),
        ("six x ≥ y", None),
        ("six seven", None),
        ("Therefore, the total of it is exactly approximately about only just six", None),
        ("so she has six", 6),
        ("so they have about six", 6),
        ("it makes a total of six", 6),
        ("we have an answer equal to six", 6),
        ("final answer equals six", 6),
        ("there are just six", 6),
        ("he gets only six", 6),
        ("they be six", 6),
        ("its exactly approximately six", 6),
        ("eat six", None),
    ],
)
def test_what_words_mean(text, expected):
    assert number_in_words(text) == expected


def test_only_the_beginning_is_read():
    assert number_in_words("a " * (MAX_CHARS // 2 - 2) + "six") == 6
    assert number_in_words(" " * (MAX_CHARS - 3) + "six") == 6
    assert number_in_words(" " * MAX_CHARS + "six") is None
    assert number_in_words("six".ljust(MAX_CHARS, ".") + "7") == 6
    assert number_in_words("six".ljust(MAX_CHARS - 1, ".") + "7") is None
    assert MAX_LINE_CHARS < MAX_CHARS < 1000, "a number is not cut"
