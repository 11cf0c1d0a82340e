"""Numbers in text: what each notation means, where the number lies, and what is no number."""

from __future__ import annotations

from fractions import Fraction

import pytest

from agentrl.extras.answers.numbers import (
    MAX_DIGITS,
    FoundNumber,
    has_number,
    in_smaller_unit,
    numbers_in,
    unit_of,
    with_signs,
)


def values(text: str, *, decimal_commas: bool = True) -> list[Fraction | None]:
    return [number.value for number in numbers_in(with_signs(text, decimal_commas=decimal_commas))]


HUNDRED, THOUSAND, LAKH, MILLION, CRORE, BILLION = (10**power for power in (2, 3, 5, 6, 7, 9))


@pytest.mark.parametrize(
    ("text", "scale"),
    [
        ("3 hundred", HUNDRED),
        ("3 thousand", THOUSAND),
        ("3-thousand", THOUSAND),
        ("3 Thousands", THOUSAND),
        ("3k", THOUSAND),
        ("3 k", THOUSAND),
        ("3K", THOUSAND),
        ("3 lakh", LAKH),
        ("3 million", MILLION),
        ("3M", MILLION),
        ("3mn", MILLION),
        ("3 mn", MILLION),
        ("3 mln", MILLION),
        ("3mln", MILLION),
        ("3 crore", CRORE),
        ("3 billion", BILLION),
        ("3B", BILLION),
        ("3b", BILLION),
        ("3bn", BILLION),
        ("3 Bn", BILLION),
        ("3 trillion", 10**12),
        ("3 dozen", 12),
        ("3", 1),
        ("3 apples", 1),
    ],
)
def test_every_scale_is_a_factor(text, scale):
    (number,) = numbers_in(text)
    assert (number.value, number.scale) == (3 * scale, scale)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("none", []),
        ("7", [7]),
        ("007", [7]),
        ("1,234", [1234]),
        ("1,234.5", [Fraction("1234.5")]),
        ("12,34,567", [1234567]),
        ("1 234 567", [1234567]),
        ("1'234'567", [1234567]),
        ("1_234", [1234]),
        ("1.234.567", [1234567]),
        ("1.234,56", [Fraction("1234.56")]),
        ("1 234,56", [Fraction("1234.56")]),
        ("1'234,5", [Fraction("1234.5")]),
        ("1.234", [Fraction("1.234")]),
        (".5", [Fraction(1, 2)]),
        ("-.5", [Fraction(-1, 2)]),
        ("1 1/2", [Fraction(3, 2)]),
        ("1 and 1/2", [Fraction(3, 2)]),
        ("1 2/2", [None]),
        ("1 3/2", [None]),
        ("3/4", [Fraction(3, 4)]),
        ("3 / 4", [Fraction(3, 4)]),
        ("3/1,000", [Fraction(3, 1000)]),
        ("3/0", [None]),
        ("0/3", [0]),
        ("-3/4", [Fraction(-3, 4)]),
        ("+3", [3]),
        ("$-5", [-5]),
        ("-$5", [-5]),
        ("$5", [5]),
        ("€1,50", [Fraction(3, 2)]),
        ("2e3", [2000]),
        ("2E-3", [Fraction(2, 1000)]),
        ("2e+3", [2000]),
        ("6 × 10^4", [60000]),
        ("6 x 10^{-2}", [Fraction(6, 100)]),
        ("6*10**4", [60000]),
        ("10^3", [1000]),
        ("10^{12}", [10**12]),
        ("3:00", [3]),
        ("10-3", [10, 3]),  # a subtraction: 3 is not negative
        ("1 million and 2", [MILLION, 2]),
        ("1.5 million", [1500000]),
        ("1/2 million", [500000]),
        ("between 3 and 5", [3, 5]),
        ("3 and a half", [Fraction(7, 2)]),
        ("3 and one half", [Fraction(7, 2)]),
        ("3 and one-half", [Fraction(7, 2)]),
        ("3 and a quarter", [Fraction(13, 4)]),
        ("3 and one quarter", [Fraction(13, 4)]),
        ("3 and three quarters", [Fraction(15, 4)]),
        ("3 and a third", [Fraction(10, 3)]),
        ("3 and one third", [Fraction(10, 3)]),
        ("3 and two thirds", [Fraction(11, 3)]),
        ("minus 4", [-4]),
        ("negative $4", [-4]),
        ("= - 4", [-4]),
        ("- 4", [-4]),
        ("-(4)", [-4]),
        ("= -( $4.50 )", [Fraction(-9, 2)]),
        ("2024-05-06", []),
        ("3,5", [Fraction(7, 2)]),
        ("3,0", []),  # may be a list
        ("3,00", [3]),
        ("0,125", [Fraction(1, 8)]),
        ("0,0", []),
        ("5 dollars and 50 cents", [Fraction("5.50")]),
        ("5 dollars and 5 cents", [Fraction("5.05")]),
        ("$5 and 50 cents", [Fraction("5.50")]),
        ("1,234 euros, 7 cents", [Fraction("1234.07")]),
        ("1 hour 30 minutes", [Fraction(90, 60)]),
        ("1 hr and 59 mins", [Fraction(119, 60)]),
        ("1h30m", [Fraction(90, 60)]),
        ("2 minutes 15 seconds", [Fraction(135, 60)]),
        ("5 feet 6 inches", [Fraction(66, 12)]),
        ("5 ft 12 in", [5, 12]),  # as many inches as a foot are no part of one
        ("3 lbs 8 oz", [Fraction(56, 16)]),
        ("2 years 6 months", [Fraction(30, 12)]),
        ("2 weeks 3 days", [Fraction(17, 7)]),
        ("2 kg 500 g", [Fraction(2500, 1000)]),
        ("2 meters 50 cm", [Fraction(250, 100)]),
        ("3 km 250 meters", [Fraction(3250, 1000)]),
        ("3 apples 4 pears", [3, 4]),
        ("3 apples 0 pears", [3, 0]),
        ("3x", []),
        ("x_3", []),
        ("3^2", []),
        ("√3", []),
        ("3.5.7", []),
        ("a3", []),
        ("3h20", []),
    ],
)
def test_every_notation_is_a_value(text, expected):
    assert values(text) == expected


def test_a_list_keeps_its_commas_when_asked():
    assert values("3,5", decimal_commas=False) == []
    assert with_signs("3,5", decimal_commas=False) == "3,5"
    assert with_signs("3,5") == "3.5"
    assert with_signs("between 3 and 5") == "3 to 5"
    assert with_signs("2x3") == "2×3"
    assert with_signs("0x3") == "0x3"


def test_a_number_lies_where_its_text_does():
    text = "she paid -$1,234.50 for 3 dozen (about 2e3 g)"
    assert [(text[n.start : n.end], n.value, n.scale) for n in numbers_in(text)] == [
        ("-$1,234.50", Fraction("-1234.5"), 1),
        ("3 dozen", 36, 12),
        ("2e3", 2000, 1),
    ]
    assert FoundNumber(Fraction(1), 0, 1).scale == 1


def test_a_number_has_as_many_characters_as_can_be_an_answer():
    assert values("9" * MAX_DIGITS) == [10**MAX_DIGITS - 1]
    assert values("9" * (MAX_DIGITS + 1)) == [None]
    assert values(". " * MAX_DIGITS + "7") == [7]
    assert MAX_DIGITS == 100


@pytest.mark.parametrize(("text", "has"), [("a 1 b", True), ("a b", False), ("x_1", False), ("$.5", True)])
def test_whether_a_text_has_a_number(text, has):
    assert has_number(text) is has


@pytest.mark.parametrize(
    ("text", "unit", "is_percent"),
    [
        ("5", "", False),
        ("5 apples", "", False),
        ("5%", "", True),
        ("5 %", "", True),
        ("5 percent", "", True),
        ("$5", "dollar", False),
        ("-$5", "dollar", False),
        ("€5", "euro", False),
        ("5€", "euro", False),
        ("5 $", "dollar", False),
        ("5 Mins", "minute", False),
        ("$5 cents", "cent", False),
        ("15$", "dollar", False),
        ("15 and $3", "", False),
        ("1 $", "dollar", False),
        ("$+5", "dollar", False),
        ("$ +5", "", False),
        ("US$5", "dollar", False),
    ],
)
def test_the_unit_of_a_number(text, unit, is_percent):
    assert unit_of(text, numbers_in(text)[0]) == (unit, is_percent)


def test_a_currency_belongs_to_the_number_that_it_touches():
    text = "$ 5 or 7"
    first, second = numbers_in(text)
    assert unit_of(text, first)[0] == "dollar"
    assert unit_of(text, second)[0] == ""
    text = "3 or 4$5"
    assert unit_of(text, numbers_in(text)[0])[0] == ""


NAMES = {
    "hour": "hours hour hrs hr h",
    "minute": "minutes minute mins min m",
    "second": "seconds second secs sec s",
    "foot": "feet foot ft",
    "inch": "inches inch in",
    "pound": "pounds pound lbs lb",
    "ounce": "ounces ounce oz",
    "year": "years year yrs yr",
    "month": "months month",
    "week": "weeks week",
    "day": "days day",
    "kg": "kilograms kilogram kg",
    "gram": "grams gram g",
    "meter": "meters meter metres metre",
    "cm": "centimeters centimeter cm",
    "km": "kilometers kilometer km",
    "dollar": "dollars dollar bucks",
    "euro": "euros euro",
    "cent": "cents cent",
}
SIZES = {
    ("hour", "minute"): 60,
    ("minute", "second"): 60,
    ("foot", "inch"): 12,
    ("pound", "ounce"): 16,
    ("year", "month"): 12,
    ("week", "day"): 7,
    ("dollar", "cent"): 100,
    ("euro", "cent"): 100,
    ("kg", "gram"): 1000,
    ("meter", "cm"): 100,
    ("km", "meter"): 1000,
}


def test_units_have_their_names_and_sizes():
    for unit, names in NAMES.items():
        for name in names.split():
            assert unit_of(f"5 {name}", FoundNumber(Fraction(5), 0, 1)) == (unit, False)
    for one in NAMES:
        for other in NAMES:
            factor = SIZES.get((one, other))
            assert in_smaller_unit(Fraction(3, 2), one, other) == (factor and Fraction(3, 2) * factor)
