"""Equations in an answer: `3 + 15 = 18` and `18 = 9 * 2` state 18; `17 = 18` contradicts itself; `18 = 18`
says nothing.

A chain of equations with sides of different values states no number. A side is evaluated if it consists of
numbers, operators and units. Rounding is allowed to the precision written (20 / 3 = 6.67). A side that cannot
be evaluated (2x = 36, 1 hour + 30 minutes) is trusted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from agentrl.extras.answers.numbers import FoundNumber, in_smaller_unit, numbers_in, unit_of

MAX_BITS = 1000
MAX_TOKENS = 80
MAX_CHARS = 300
MAX_ROUNDING = Fraction(1, 50)
"""Relative, for a side that is itself a sum of rounded numbers. `≈` allows five times as much."""

_POWER = re.compile(r"(?<![\w.^])(?P<base>[0-9]{1,4})\s?\^\s?\{?(?P<power>[0-9])\}?(?![\w^.!])")
_FACTORIAL = re.compile(r"(?<![\w.^])(?P<of>[0-9]|1[0-9])!(?![!\w])")
_TIMES = re.compile(r"(?<=[0-9)])\s?[x×]\s?(?=[0-9($])")
_EQUALS = re.compile(r"=|≈|\b(?:equals|is|makes|gives)\b")
_TOKEN = re.compile(
    rf"(?P<equals>{_EQUALS.pattern})"
    r"|(?P<operator>[-+*×·/()]|\b(?:times|plus|minus|multiplied by|divided by|of)\b)"
    r"|(?P<clause>\b(?:and|but|so|then|or|thus|hence|therefore|because|since|when|if|where|with)\b)"
    r"|(?P<other>\.\.+|…|\bmod(?:ulus|ulo)?\b|[A-Za-z](?![A-Za-z])|[A-Z]{2,3}(?![A-Za-z]))|(?P<word>[A-Za-z][A-Za-z']+)|(?P<end>[,;:→⇒?]|[.!](?=\s|$)(?!\s[+*×·/=]))|[\s$€£¥₹%.°\"']|(?P<unknown>.)",
    re.DOTALL,
)
_MEANING = {
    "times": "*",
    "×": "*",
    "·": "*",
    "multiplied by": "*",
    "divided by": "/",
    "plus": "+",
    "minus": "-",
}
_EMPTY = re.compile(r"[^0-9./%]")


@dataclass(frozen=True, slots=True)
class _Token:
    """A number with its unit, or a sign: an operator, "=", "≈", "w" (word), "." (end of a clause) or "?"
    (other).
    """

    sign: str
    value: Fraction | None = None
    unit: str = ""
    is_share: bool = False
    scale: int = 1
    step: Fraction = Fraction(1)
    written: str = ""


@dataclass(frozen=True, slots=True)
class _Side:
    """`values`: possible values, with percents as numbers first.

    `step`: unit of its last digit, None for a sum.
    """

    values: tuple[Fraction, ...]
    step: Fraction | None
    units: frozenset[str]
    is_whole: bool
    is_named: bool
    written: str


def is_false(line: str) -> bool:
    """Return whether some equation of a line has two sides that can be evaluated and differ."""
    line = line[-MAX_CHARS:]
    return bool(_EQUALS.search(line)) and any(
        not _agree(left, right, sign) for left, sign, right in _equations(line)
    )


def worked_out(line: str) -> Fraction | None:
    """Return the result of a line of sums and their result: `2 * (16 - 7) = 18`, `18 = 9 * 2`, `1/4 =
    25%`.
    """
    if len(line) > MAX_CHARS or not _EQUALS.search(line):
        return None
    equations = list(_equations(line))
    num_equals = sum(token.sign in "=≈" for token in _tokens(line))
    if (
        not equations
        or len(equations) != num_equals
        or not all(left.is_whole and right.is_whole for left, _, right in equations)
        or not all(_agree(left, right, sign) for left, sign, right in equations)
    ):
        return None
    if len({equations[0][0].written, *(right.written for _, _, right in equations)}) == 1:
        return None  # 18 = 18
    first, last = equations[0][0], equations[-1][2]
    return last.values[0] if last.step is not None or first.step is None else first.values[0]


def is_no_result(line: str, found: Sequence[FoundNumber], end: int) -> bool:
    """Return whether number `end` is in a trivial equation of two equal numbers: 18 = 18."""
    if end == 0 or not re.fullmatch(r"\s?=\s?", line[found[end - 1].end : found[end].start]):
        return False
    left, right = found[end - 1], found[end]
    begins = re.search(r"(?:\A|[=,;:$(])\s*$", line[: left.start])
    return begins is not None and (left.value != right.value or _written(line, left) == _written(line, right))


def _equations(line: str) -> Iterator[tuple[_Side, str, _Side]]:
    """Yield the equations of a line, with their signs, whose sides can both be evaluated."""
    tokens = _tokens(line)
    for position, token in enumerate(tokens):
        if token.sign not in "=≈":
            continue
        begin = max((i + 1 for i in range(position) if tokens[i].sign in "=≈."), default=0)
        is_inner = begin > 0 and tokens[begin - 1].sign in "=≈"
        end = next((i for i in range(position + 1, len(tokens)) if tokens[i].sign in "=≈."), len(tokens))
        left = _left_side(tokens[begin:position], is_inner=is_inner)
        right = _right_side(
            tokens[position + 1 : end], is_inner=end < len(tokens) and tokens[end].sign in "=≈"
        )
        if left is None or right is None or (left.is_named and left.step is not None):
            continue  # 3 feet = 1 yard
        if (token.written[0] in "=≈" or left.step is None) and not _are_mixed(left.units | right.units):
            yield left, token.sign, right


def _tokens(line: str) -> list[_Token]:
    line = _TIMES.sub("*", line)
    line = _POWER.sub(lambda found: f"{int(found['base']) ** int(found['power'])}.0", line)
    line = line.replace("/.", "/ .")
    line = _FACTORIAL.sub(lambda found: f"{math.factorial(int(found['of']))}.0", line)
    tokens: list[_Token] = []
    position = 0
    for number in numbers_in(line):
        start = number.start
        tokens += _signs(line, position, start)
        value, position = number.value, number.end
        if number.scale != 1 and not line[max(0, number.end - 2) : number.end].isalpha():  # 2B may be twice B
            tokens.append(_Token("?"))
            continue
        if value is not None and line[start] in "+-" and tokens and tokens[-1].sign in ("n", ")"):  # 20 -2
            tokens.append(_Token(line[start]))
            value = abs(value)
        unit, is_share = unit_of(line, number)
        tokens.append(
            _Token(
                "n",
                value,
                unit,
                is_share,
                number.scale,
                _step(line[number.start : number.end]),
                _written(line, number),
            )
        )
    tokens += _signs(line, position, len(line))
    return tokens if len(tokens) <= MAX_TOKENS else []


def _signs(line: str, start: int, end: int) -> list[_Token]:
    found = ((_sign(token), token[0]) for token in _TOKEN.finditer(line, start, end))
    return [_Token(sign, written=written) for sign, written in found if sign is not None]


def _sign(found: re.Match[str]) -> str | None:
    """Return the sign of a token between numbers.

    None for spaces and currency symbols, which mean nothing.
    """
    if found["equals"]:
        return "≈" if found["equals"] == "≈" else "="
    if found["operator"]:
        return _MEANING.get(found["operator"], found["operator"])
    if found["word"]:
        return "w"
    return "." if found["end"] or found["clause"] else "?" if found["other"] or found["unknown"] else None


def _step(written: str) -> Fraction:
    """Return the unit of the last digit of a number: 0.01 for 6.67."""
    decimals = re.search(r"\.([0-9]+)(?:\s?[A-Za-z]+)?$", written)
    return Fraction(1, 10 ** len(decimals[1])) if decimals else Fraction(1)


def _left_side(tokens: Sequence[_Token], *, is_inner: bool) -> _Side | None:
    """Return the sum before an equals sign.

    Words may precede a sum ("she has 3 + 4"), but not a single number.
    """
    start = 0
    for position, token in enumerate(tokens):
        if token.sign == "?" or (token.sign == "w" and not _is_unit(tokens, position)):
            start = position + 1
    if start and (is_inner or start == len(tokens) or tokens[start].sign != "n"):
        return None
    side = _computed(tokens[start:])
    if side is None or (start and (side.step is not None or tokens[start - 1].sign == "?")):
        return None
    return replace(side, is_whole=False) if start else side


def _right_side(tokens: Sequence[_Token], *, is_inner: bool) -> _Side | None:
    """Return the sum after an equals sign; words may follow it."""
    end = len(tokens)
    for position, token in enumerate(tokens):
        if token.sign == "?" or (token.sign == "w" and not _is_unit(tokens, position)):
            end = position
            break
    if end < len(tokens) and (is_inner or any(token.sign != "w" for token in tokens[end:])):
        return None
    return _computed(tokens[:end])


def _is_unit(tokens: Sequence[_Token], position: int) -> bool:
    signs = [token.sign for token in tokens[max(0, position - 2) : position]]
    return signs[-1:] == ["n"] or signs == ["n", "w"]


def _computed(tokens: Sequence[_Token]) -> _Side | None:
    """Evaluate a sum of numbers; None if it is not one."""
    terms = [token for token in tokens if token.sign != "w"]
    numbers = [token for token in terms if token.sign == "n"]
    if not numbers or any(token.value is None for token in numbers):
        return None
    values: dict[Fraction, None] = {}  # an ordered set; the literal reading comes first
    for reading in _READINGS:
        parser = _Parser(terms, reading)
        if (value := parser.sum()) is None or parser.position != len(terms):
            return None
        values[value] = None
    units = frozenset(token.unit for token in numbers)
    written = "".join(token.written or token.sign for token in terms)
    step = numbers[0].step if len(terms) == 1 else None
    return _Side(
        tuple(values), step, units, is_whole=True, is_named=len(terms) < len(tokens), written=written
    )


_Reading = Callable[[Fraction, _Token], Fraction]
_READINGS: Sequence[_Reading] = (
    lambda value, token: value,
    lambda value, token: value / 100 if token.is_share else value,  # 20% as 0.2
    # 3 of "3 million": if only the result has a scale, it is a unit (120 - 60 = 60 million).
    lambda value, token: value / token.scale,
)


class _Parser:
    """Recursive-descent parser of sums. `of`, and a bracket after a number, multiply."""

    def __init__(self, tokens: Sequence[_Token], read: _Reading) -> None:
        self._tokens, self._read, self.position = tokens, read, 0

    def sum(self) -> Fraction | None:
        sign = self._take("+-") or "+"
        total = Fraction(0)
        while True:
            term = self._product()
            if term is None:
                return None
            if (sum_ := _bounded(total - term if sign == "-" else total + term)) is None:
                return None
            total = sum_
            if not (sign := self._take("+-")):
                return total

    def _product(self) -> Fraction | None:
        product = self._factor()
        while product is not None:
            sign = self._take("*/") or (
                "*" if self._next() == "of" and self._take_of() else "*" if self._next() == "(" else ""
            )
            if not sign:
                return product
            factor = self._factor()
            if factor is None or (sign == "/" and not factor):
                return None
            product = _bounded(product / factor if sign == "/" else product * factor)
        return None

    def _factor(self) -> Fraction | None:
        if self._take("("):
            inside = self.sum()
            return inside if self._take(")") else None
        if self._next() != "n":
            return None
        token = self._tokens[self.position]
        self.position += 1
        assert token.value is not None, "a side without all of its values is not parsed"
        return self._read(token.value, token)

    def _next(self) -> str:
        return self._tokens[self.position].sign if self.position < len(self._tokens) else ""

    def _take(self, signs: str) -> str:
        sign = self._next()
        is_taken = sign != "" and sign in signs
        self.position += is_taken
        return sign if is_taken else ""

    def _take_of(self) -> bool:
        """Return whether the operand before `of` is a share: 3/4 of 24, but not 5 parts of 25."""
        before = self._tokens[self.position - 1]
        self.position += 1
        return before.is_share or (before.value is not None and before.value < 1)


def _bounded(value: Fraction) -> Fraction | None:
    return value if max(value.numerator.bit_length(), value.denominator.bit_length()) <= MAX_BITS else None


def _agree(left: _Side, right: _Side, sign: str) -> bool:
    """Return whether two sides have one value, up to rounding to the precision of the right one."""
    return any(_is_rounded(one, other, right.step, sign) for one in left.values for other in right.values)


def _is_rounded(exact: Fraction, written: Fraction, step: Fraction | None, sign: str) -> bool:
    if exact == written:
        return True
    difference = abs(exact - written)
    allowed = MAX_ROUNDING * abs(exact) * (5 if sign == "≈" else 1)
    if step is None:  # a sum of rounded numbers
        return (exact.denominator > 1 or written.denominator > 1) and difference <= allowed
    return ((exact / step).denominator > 1 and difference < step) or (sign == "≈" and difference <= allowed)


def _are_mixed(units: frozenset[str]) -> bool:
    """Return whether units are of one kind, like hours and minutes: their numbers cannot simply be added."""
    return any(in_smaller_unit(Fraction(1), one, other) is not None for one in units for other in units)


def _written(line: str, number: FoundNumber) -> str:
    return _EMPTY.sub("", line[number.start : number.end + 1].rstrip("."))
