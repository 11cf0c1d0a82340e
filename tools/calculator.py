"""A calculator: exact arithmetic on an expression written by the model, without `eval`.

Values are fractions, so 0.1 + 0.2 is 0.3 and integers are exact. All sizes are bounded: an expression like
9**9**9 must cost microseconds and must not hang a worker.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import ClassVar

from agentrl.plugins import Tool, ToolResult
from agentrl.types import JsonObject

MAX_LENGTH = 256
"""Characters of an expression."""
MAX_DEPTH = 64
"""Nested operations. The parser itself fails at a few hundred."""
MAX_BITS = 512
"""Bits of a numerator or denominator: 154 decimal digits, and always within the range of a float."""
MAX_EXPONENT = 1024

BINARY: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda base, exponent: _power(base, exponent),
}
UNARY: Mapping[type[ast.unaryop], Callable[[Fraction], Fraction]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
ALPHABET = frozenset("0123456789.eE_+-*/%() ")
OPERATORS = "+ - * / // % ** and parentheses"


class Calculator(Tool):
    """Returns the value of `expression`, or what is wrong with it."""

    name: ClassVar[str] = "calculator"
    description: ClassVar[str] = "Compute an arithmetic expression."
    parameters: ClassVar[JsonObject] = {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    }
    runtime = "trio"

    async def call(self, arguments: JsonObject) -> ToolResult:
        try:
            return ToolResult(format_number(evaluate(arguments["expression"])))
        except ValueError as error:
            return ToolResult(f"error: {error}", is_error=True)


def evaluate(expression: str) -> Fraction:
    """Return the value of an expression of numbers, + - * / // % ** and parentheses.

    The value is exact, except for powers with a fractional exponent.

    Raises:
        ValueError: the expression is malformed, divides by zero, or exceeds a bound of this file.
    """
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"the expression has {len(expression)} characters, at most {MAX_LENGTH} are allowed")
    if unknown := sorted(set(expression.strip()) - ALPHABET):
        raise ValueError(f"{' '.join(unknown[:5])!r} is not supported; use numbers, {OPERATORS}")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    # ast raises the last three for deep nesting, null bytes and too many digits.
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        raise ValueError(f"cannot read the expression; use numbers, {OPERATORS}") from None
    return _value(tree.body, depth=0)


def format_number(value: Fraction) -> str:
    """Format integers exactly and all other values with at most 10 significant digits."""
    return str(value.numerator) if value.denominator == 1 else format(float(value), ".10g")


def _value(node: ast.expr, *, depth: int) -> Fraction:
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} nested operations")
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(_exact(number))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in UNARY:
            return UNARY[type(op)](_value(operand, depth=depth + 1))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            return _apply(op, _value(left, depth=depth + 1), _value(right, depth=depth + 1))
    raise ValueError(f"only numbers, {OPERATORS} are supported")


def _exact(number: float) -> Fraction:
    try:
        # A float is converted via its shortest text: 0.1 means one tenth, not the nearest binary number.
        return Fraction(number) if isinstance(number, int) else Fraction(repr(number))
    except ValueError:
        raise ValueError("a number is too large") from None


def _apply(op: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    try:
        return _bounded(Fraction(BINARY[type(op)](left, right)))
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the result is too large") from None


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        if base < 0:
            raise ValueError("a negative number has no fractional power")
        return Fraction(repr(float(base) ** float(exponent)))
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    # Bound the size before computing the power. Numbers of 1 bit (-1, 0, 1) never grow.
    if abs(exponent) > MAX_EXPONENT or (bits > 1 and (bits - 1) * abs(exponent) > MAX_BITS):
        raise ValueError("the result of ** is too large")
    return base ** int(exponent)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError(f"a number has more than {MAX_BITS} bits")
    return value
