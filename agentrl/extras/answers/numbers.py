"""Numbers in text as exact values, in all notations: 1,234.50, 1'234, -$5, 1 1/2, 50%, 1.5 million, 6 ×
10^4.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 100
"""More digits are no answer, and slow to convert."""

_SCALES = {
    "k": 10**3, "m": 10**6, "b": 10**9, "bn": 10**9, "hundred": 10**2, "thousand": 10**3, "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12, "lakh": 10**5, "crore": 10**7, "dozen": 12, "mn": 10**6, "mln": 10**6,
}  # fmt: skip
_SCALE = rf"(?:{'|'.join(name for name in _SCALES if len(name) > 3)})"
# Thousands separators: commas, spaces, apostrophes or underscores; Indian grouping; dots only if a second
# group or a decimal comma makes them unambiguous. A comma before one or two digits is a decimal comma unless
# it may separate a list (`_decimal_comma`).
_GROUPED = (
    r"[1-9][0-9]{0,2}(?:(?:,[0-9]{3})++|(?:\ [0-9]{3})++|(?:'[0-9]{3})++|(?:_[0-9]{3})++)(?![0-9]|[,\ "
    r"'_][0-9]{3})(?:\.[0-9]++)?(?!,[0-9])"
    r"|[1-9][0-9]?(?:,[0-9]{2}(?=,))++,[0-9]{3}(?![0-9]|,[0-9])(?:\.[0-9]++)?"
    r"|[1-9][0-9]{0,2}(?:(?:\.[0-9]{3}){1,10}|(?:\ [0-9]{3}){1,10}|(?:'[0-9]{3}){1,10}),[0-9]{1,20}(?![0-9,])"
    r"|[1-9][0-9]{0,2}(?:\.[0-9]{3}){2,10}(?![0-9]|\.[0-9])"
)
_CURRENCY = r"(?:Rs\.?|USD|US\$|EUR|GBP|INR|CHF|[A-Z]{0,2}[$€£¥₹])"
# A minus directly after a word, a digit or a bracket is a subtraction. Parts of words, indices, powers,
# roots, times of day and dates are not numbers. What follows (a unit, a percent sign, a full stop) is not
# part of the number.
_NUMBER = re.compile(
    rf"""
    (?:(?<![-\w.)\]}}%])(?P<sign>[-+]))?
    (?<![A-Za-z_^√ƒ{{0-9])(?<![0-9][.:/,'])(?<!mod\ )
    (?:{_CURRENCY}\s?)?+(?P<inner>(?<=[$€£¥₹])-)?
    (?P<digits>{_GROUPED}|[0-9]++(?:\.[0-9]++)?|\.[0-9]++)
    (?: (?:\ and)?\ {{1,2}}(?P<part>[0-9]{{1,4}}+)/(?P<whole>[0-9]{{1,4}}+)
      | \s?/\s?{_CURRENCY}?(?P<over>[0-9]++(?:,[0-9]{{3}}(?![0-9]))*+(?:\.[0-9]++)?)
      | [eE](?P<e>[-+]?[0-9]{{1,2}}+)(?![\w.])
      | \s?[×x*]\s?10\s?(?:\^|\*\*)\s?\{{?(?P<power>[-+]?[0-9]{{1,2}}+)\}}?
      | :00(?![0-9:])
    )?+
    (?:[\s-]?(?P<scale>(?i:{_SCALE})|(?<=[0-9]\s)(?:[kK]|[bB]n|mln|mn)|(?<=[0-9])(?:[kKM]|[bB]n?|mln|mn))s?(?![A-Za-z&]))?+
    (?!:?[0-9]|\.[0-9]|/[0-9]|\s?\^|\s?\*\*\s?[0-9]|\s?[π√ƒ∞]|(?:[eijnqruwxyz]|a(?!\.?m)|o(?!'))\b|\s(?![xo]\b)[aeijnoqruwxyz]\s?(?:\Z|[-+*/^=])
      |\s?/\s?[xyzn]\b|h[0-9]|[.,][xX?]|_[0-9{{]|'[0-9]|,[0-9]{{1,3}}(?![0-9]))
    """,
    re.VERBOSE,
)
_TIMES = re.compile(r"(?<=[0-9])(?<!\b0)x(?=[0-9])")
_SPACED_MINUS = re.compile(r"(\A|[=:≈][ \t]?)-[ \t](?=[$€£¥₹]?[0-9.])")
_MINUS_WORD = re.compile(r"(?i)(?<![0-9] )\b(?:negative|minus) (?=[$€£¥₹]?[0-9.])")
_BETWEEN = re.compile(r"(?i)\bbetween (\S{1,20}) and ")
_NEGATED = re.compile(r"(\A|[=:≈]\s?)-\s?\(\s?([$€£¥₹]?[0-9][0-9.,]{0,20})\s?\)")
_POWER_OF_TEN = re.compile(
    r"(?<![\w.,×*^/{(\\])(?<![×*x]\s)10\s?\^\s?(?:\{([0-9]{1,2})\}|([0-9]{1,2}))(?![\w^.!/])"
)
_DATE = re.compile(r"\b[0-9]{4}-[0-9]{2}-[0-9]{2}\b")
_DECIMAL_COMMA = re.compile(
    r"(?<![0-9A-Za-z.,'/])(?<!\( "
    r")(?<!\()(?:(?P<whole>[1-9][0-9]{0,8}),(?P<part>[0-9]{1,2})|0,(?P<zero>[0-9]{1,9}))(?![0-9.,/]"
    r"|\s?[,;]\s?[0-9])"
)
_PARTS = {
    " and a half": " 1/2", " and one half": " 1/2", " and one-half": " 1/2", " and a quarter": " 1/4", " and "
    "one quarter": " 1/4",
    " and three quarters": " 3/4", " and a third": " 1/3", " and one third": " 1/3", " and two thirds": " "
    "2/3",
}  # fmt: skip
_PART = re.compile(rf"(?<=[0-9])(?:{'|'.join(_PARTS)})\b")
_LARGER = r"dollars?|bucks|euros?|pounds?|rupees?|francs?"
_SMALLER = r"cents?|pence|penny|pennies|p|paise|¢|c"
_MONEY = re.compile(
    rf"(?i)(?P<unit>[$€£₹]\s?)?(?P<whole>[0-9]{{1,9}}|[0-9]{{1,3}}(?:,[0-9]{{3}}){{1,3}})(?(unit)(?:\s?(?:{_LARGER}))?|\s?(?:{_LARGER}))"
    rf",?(?:\s(?:and\s)?|\s?&\s?)(?P<part>[0-9]{{1,2}})\s?(?:{_SMALLER})(?![A-Za-z0-9])"
)
_COMPOUND = re.compile(
    r"(?<![0-9.,:/A-Za-z])(?P<whole>[0-9]{1,6})\s?(?P<larger>[A-Za-z]{1,11})\.?(?:,?\s(?:and\s)?|(?=[0-9]))"
    r"(?P<part>[0-9]{1,4})\s?(?P<smaller>[A-Za-z]{1,11})(?![A-Za-z0-9])"
)
_UNITS = {
    unit: name
    for name, units in {
        "hour": "hours hour hrs hr h", "minute": "minutes minute mins min m", "second": "seconds second secs "
        "sec s",
        "foot": "feet foot ft", "inch": "inches inch in", "pound": "pounds pound lbs lb", "ounce": "ounces "
        "ounce oz",
        "year": "years year yrs yr", "month": "months month", "week": "weeks week", "day": "days day",
        "kg": "kilograms kilogram kg", "gram": "grams gram g", "meter": "meters meter metres metre",
        "cm": "centimeters centimeter cm",
        "km": "kilometers kilometer km", "dollar": "dollars dollar bucks $", "euro": "euros euro €",
        "cent": "cents cent ¢",
    }.items()
    for unit in units.split()
}  # fmt: skip
_FACTORS = {
    ("hour", "minute"): 60, ("minute", "second"): 60, ("foot", "inch"): 12, ("pound", "ounce"): 16, ("year",
    "month"): 12,
    ("week", "day"): 7, ("dollar", "cent"): 100, ("euro", "cent"): 100, ("kg", "gram"): 1000, ("meter",
    "cm"): 100, ("km", "meter"): 1000,
}  # fmt: skip
_UNIT_BEHIND = re.compile(r"\s?([A-Za-z]{1,11}|[%¢$€])")


@dataclass(frozen=True, slots=True)
class FoundNumber:
    """A number in a text, at text[start:end]. `value` is None if it cannot be an answer (too long, division
    by zero).

    `scale`: the factor of its last word, 1000 for "3 thousand".
    """

    value: Fraction | None
    start: int
    end: int
    scale: int = 1


def with_signs(text: str, *, decimal_commas: bool = True) -> str:
    """Return plain text in which each quantity is one number.

    Minus signs are directly before their numbers, halves are in digits, and ranges use `to`. `2 dollars and
    50 cents` becomes `2.50 dollars`, `1 hour 30 minutes` becomes `3/2 hours`; dates are removed. With
    `decimal_commas`, `3,5` is 3.5; pass False to search texts that may contain lists.
    """
    text = _PART.sub(lambda found: _PARTS[found[0]], text)
    text = _TIMES.sub("×", text)
    text = _DATE.sub(" ", _BETWEEN.sub(r"\1 to ", text))
    text = _POWER_OF_TEN.sub(lambda found: f"1e{found[1] or found[2]}", _NEGATED.sub(r"\1-\2", text))
    text = _MINUS_WORD.sub("-", _SPACED_MINUS.sub(r"\1-", text))
    text = _MONEY.sub(lambda found: f"{found['whole']}.{int(found['part']):02d} dollars", text)
    text = _COMPOUND.sub(_compound, text)
    return _DECIMAL_COMMA.sub(_decimal_comma, text) if decimal_commas else text


def numbers_in(text: str) -> list[FoundNumber]:
    """Return the numbers of a plain text (see `plain` and `with_signs`) in order."""
    return [
        FoundNumber(_value(found), found.start(), found.end(), _scale(found))
        for found in _NUMBER.finditer(text)
    ]


def has_number(text: str) -> bool:
    """Return whether a plain text contains a number."""
    return _NUMBER.search(text) is not None


def unit_of(text: str, number: FoundNumber) -> tuple[str, bool]:
    """Return a number's unit ("minute" for 5 mins, "" for 5 apples), and whether it is a percentage."""
    found = _UNIT_BEHIND.match(text, number.end)
    unit = found[1].lower() if found else ""
    written = text[max(0, number.start - 1) : number.end]
    currency = next((sign for sign in "$€" if sign in written), "")
    return _UNITS.get(unit) or _UNITS.get(currency, ""), unit in ("%", "percent")


def in_smaller_unit(value: Fraction, unit: str, other: str) -> Fraction | None:
    """Convert a quantity to a smaller unit: 1.5 hours are 90 minutes.

    None if the units are not of the same kind.
    """
    factor = _FACTORS.get((unit, other))
    return None if factor is None else value * factor


def _compound(found: re.Match[str]) -> str:
    units = (_UNITS.get(found["larger"].lower(), ""), _UNITS.get(found["smaller"].lower(), ""))
    factor, whole, part = _FACTORS.get(units, 0), int(found["whole"]), int(found["part"])
    return f"{whole * factor + part}/{factor} {found['larger']}" if part < factor else found[0]


def _decimal_comma(found: re.Match[str]) -> str:
    # "1,0" may be a list; "1,00" and "0,5" cannot be
    return found[0] if (found["part"] or found["zero"]) == "0" else found[0].replace(",", ".")


def _value(found: re.Match[str]) -> Fraction | None:
    if found.end() - found.start() > MAX_DIGITS:
        return None
    value = _decimal(found["digits"])
    if found["part"]:
        part, whole = int(found["part"]), int(found["whole"])
        if part >= whole:
            return None
        value += Fraction(part, whole)
    if found["over"]:
        divisor = _decimal(found["over"])
        if not divisor:
            return None
        value /= divisor
    if exponent := found["e"] or found["power"]:
        value *= Fraction(10) ** int(exponent)
    value *= _scale(found)
    return -value if found["sign"] == "-" or found["inner"] else value


def _scale(found: re.Match[str]) -> int:
    return _SCALES[found["scale"].lower()] if found["scale"] else 1


def _decimal(digits: str) -> Fraction:
    for separator in " '_":
        digits = digits.replace(separator, "")
    if digits.count(".") > 1 or re.search(r"\..*,", digits):  # 1.234.567 and 1.234,56
        digits = digits.replace(".", "").replace(",", ".")
    elif re.fullmatch(r"[0-9]+,[0-9]{1,20}", digits) and not re.fullmatch(r"[0-9]{1,3},[0-9]{3}", digits):
        digits = digits.replace(",", ".")  # 1 234,56
    return Fraction("0" + digits.replace(",", ""))
