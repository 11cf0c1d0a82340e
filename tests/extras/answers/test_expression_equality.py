r"""Equality of parsed expressions: which are the same value, set or equation, and which only look alike."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
from sympy import (
    Eq,
    FiniteSet,
    Float,
    I,
    Integer,
    Matrix,
    MatrixSymbol,
    Rational,
    Tuple,
    cos,
    pi,
    sin,
    sqrt,
    tan,
)
from sympy.abc import x, y, z

from agentrl.extras.answers.cpu_limit import TooCostlyError
from agentrl.extras.answers.expression_equality import _POINTS, same
from agentrl.extras.answers.expressions import parse_boxed

A, B = MatrixSymbol("A", 2, 2), MatrixSymbol("B", 2, 2)
f = sympy.Function("f")
TINY = Rational(1, 10**120)
POLES = [1 / (x - point) for point in _POINTS]
COLUMN, ROW = Matrix([1, 2, 3, 4, 5, 6]), Matrix([[1, 2, 3, 4, 5, 6]])


def of(latex: str) -> Any:
    return parse_boxed(latex)[0]


def unevaluated(kind: type, *args: object) -> sympy.Expr:
    return kind(*args, evaluate=False)


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        # words
        ("yes", " yes ", True),
        ("no", "yes", False),
        ("", "", False),
        ("5", Integer(5), False),
        (Integer(5), "5", False),
        # numbers: rational ones exactly, others to 110 digits
        (Integer(5), Integer(5), True),
        (Integer(5), Integer(6), False),
        (Integer(-5), Integer(5), False),
        (Rational(1, 3), Float("0.333333333333333333333333", 30), False),
        (Rational(1, 2), Float("0.5"), True),
        (TINY, 2 * TINY, False),
        (10**200 + TINY, Integer(10**200), False),
        (sqrt(8), 2 * sqrt(2), True),
        (sqrt(3 + 2 * sqrt(2)) - sqrt(2), Integer(1), True),
        (Integer(1), sqrt(3 + 2 * sqrt(2)) - sqrt(2), True),
        (sqrt(3 + 2 * sqrt(2)) - sqrt(2), Integer(2), False),
        (sqrt(2) + sqrt(3) - sqrt(5 + 2 * sqrt(6)), Integer(0), True),
        (sqrt(2), Rational("1.4142135623730950488016887242096980785696718753769"), False),
        (sqrt(2) + Rational(1, 10**100), sqrt(2), False),
        (sqrt(2) / 10**60, sqrt(2) / 10**60 + Rational(1, 10**100), False),
        (sqrt(2) * 10**120, sqrt(2) * 10**120 + Rational(1, 10**60), False),
        (-sqrt(2) * 10**120, -sqrt(2) * 10**120 - Rational(1, 10**60), False),
        (sqrt(3 + 2 * sqrt(2)) * 10**120, (1 + sqrt(2)) * 10**120, True),
        (sqrt(2), -sqrt(2), False),
        (sin(pi / 5), cos(3 * pi / 10), True),
        (sympy.Sum(x, (x, 1, 10)), Integer(55), True),
        (sympy.Sum(x, (x, 1, 10)), Integer(54), False),
        # all digits but the last ones cancel
        (10**60 * (sqrt(10**240 + 1) - 10**120), 10**60 / (sqrt(10**240 + 1) + 10**120), True),
        (unevaluated(tan, pi / 2), Integer(0), False),
        (sympy.oo, Integer(1), False),
        (sympy.oo, sympy.oo * I, False),
        (sympy.zoo, Integer(1), False),
        (sympy.oo, sympy.oo, True),
        (sympy.oo, -sympy.oo, False),
        # complex numbers
        (sympy.Symbol("i"), I, True),
        (2 + 3 * sympy.Symbol("\\imath"), 2 + 3 * I, True),
        (sqrt(-4), 2 * I, True),
        (sqrt(-4), Integer(2), False),
        (1 + I, 1 - I, False),
        (2 * I, Integer(0), False),
        (1 + I, Integer(1), False),
        (sqrt(2) * (1 + I) / 2, unevaluated(sympy.exp, I * pi / 4), True),
        # the odd root of a negative number is real
        (unevaluated(sympy.Pow, -8, Rational(1, 3)), Integer(-2), True),
        (unevaluated(sympy.Pow, -8, Rational(2, 3)), Integer(4), True),
        (unevaluated(sympy.Pow, -32, Rational(1, 5)), Integer(-2), True),
        (unevaluated(sympy.Pow, -8, Rational(-1, 3)), Rational(-1, 2), True),
        (unevaluated(sympy.Pow, Rational(1, 8), Rational(1, 3)), Rational(1, 2), True),
        (unevaluated(sympy.Pow, -4, Rational(1, 2)), 2 * I, True),
        (unevaluated(sympy.Pow, -2, 3), Integer(-8), True),
        (2**x, 2**x + 0 * y, True),
        (2 ** (x + 1), 2 * 2**x, True),
        ((-2) ** x, (-2) ** x, True),
        # variables
        ((x + 1) ** 2, x**2 + 2 * x + 1, True),
        ((x + 1) ** 2, x**2 + 2 * x + 2, False),
        (x, 2 * x, False),
        (x, -x, False),
        (x, y, False),
        (x, sqrt(x**2), False),
        (x + y, x, False),
        (x, x + y, False),
        (x * y, y * x, True),
        (x - y, y - x, False),
        (x + 2 * y + 3 * z, x + 3 * y + 2 * z, False),
        (x, Integer(5), False),
        (Integer(5), x, False),
        ((x**2 - 1) / (x - 1) - x, Integer(1), False),  # not simplified: it has a variable
        (sin(x) ** 2 + cos(x) ** 2, Integer(1), True),
        (sin(x) ** 2 + cos(y) ** 2, Integer(1), False),
        (Integer(1), sin(x) ** 2 + cos(x) ** 2, False),
        (f(x), f(x), True),
        (f(x), 2 * f(x), False),
        # at least three points must have a value
        (2 * POLES[0], 1 / (x / 2 - _POINTS[0] / 2), True),
        (2 * POLES[0] * POLES[1], POLES[1] / (x / 2 - _POINTS[0] / 2), True),
        (2 * POLES[0] * POLES[1] * POLES[2], POLES[1] * POLES[2] / (x / 2 - _POINTS[0] / 2), False),
        ((x**2 - _POINTS[0] * x) / (x - _POINTS[0]), x, True),  # one of them has none at a point
        (x, (x**2 - _POINTS[0] * x) / (x - _POINTS[0]), True),
        (Eq((x**2 - _POINTS[0] * x) / (x - _POINTS[0]), y), Eq(x, y), True),
        (Eq(x, y), Eq((x**2 - _POINTS[0] * x) / (x - _POINTS[0]), y), True),
        (POLES[0], x, False),
        (x, POLES[0], False),
        # tuples, sets and matrices
        (Tuple(1, sqrt(8)), Tuple(1, 2 * sqrt(2)), True),
        (Tuple(1, 2), Tuple(2, 1), False),
        (Tuple(1, 2), Tuple(1, 3), False),
        (Tuple(1, 2), Tuple(1, 2, 3), False),
        (Tuple(1, 2, 3), Tuple(1, 2), False),
        (Tuple(1, Tuple(2, sqrt(8))), Tuple(1, Tuple(2, 2 * sqrt(2))), True),
        (FiniteSet(1, sqrt(8)), FiniteSet(2 * sqrt(2), 1), True),
        (FiniteSet(sqrt(2), -sqrt(3 + 2 * sqrt(2))), FiniteSet(-1 - sqrt(2), sqrt(2)), True),
        (FiniteSet(1, 2), FiniteSet(1, 3), False),
        (Tuple(1, TINY), Tuple(1, 2 * TINY), False),
        (FiniteSet(1, TINY), FiniteSet(1, 2 * TINY), False),
        (Matrix([[1, TINY]]), Matrix([[1, 2 * TINY]]), False),
        (FiniteSet(1, 2), FiniteSet(1, 2, 3), False),
        (Tuple(1, 2), Integer(1), False),
        (Integer(1), Tuple(1, 2), False),
        (Matrix([[1, sqrt(8)]]), Matrix([[1, 2 * sqrt(2)]]), True),
        (Matrix([[1, 2]]), Matrix([[1, 3]]), False),
        (Matrix([[1, 2]]), Matrix([[2, 1]]), False),
        (COLUMN, ROW, False),
        (Matrix([[1]]), Integer(1), False),
        (Integer(1), Matrix([[1]]), False),
        (A * B, A * B, True),
        (A * B, A + B, False),
        # intervals and relations
        (sympy.Interval(0, sqrt(8)), sympy.Interval(0, 2 * sqrt(2)), True),
        (sympy.Interval(0, 1), sympy.Interval.open(0, 1), False),
        (sympy.Interval(0, 1), sympy.Interval(0, 2), False),
        (x < 5, x < 5, True),
        (x < 5, x < 6, False),
        (x < 5, x > 5, False),
    ],
)
def test_what_is_the_same(answer, truth, expected):
    assert same(answer, truth) is expected


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        # what an equation states is its last value, if all its constants agree
        ("x = 5", "5", True),
        ("5 = x", "5", True),
        ("x = 5 < 6", "5", False),
        ("x = 6", "5", False),
        ("x = y", "y", True),
        ("2 + 3 = 5", "5", True),
        ("41 = 42", "42", False),
        ("41 = 42", "41", False),
        ("x = 4 = 5", "5", False),
        ("x = 5 = 4 + 1", "5", True),
        ("a = b = 5", "5", True),
        ("10/2 = 5 = x", "5", True),
        ("41 = 42 = x", "41", False),
        ("f(2) = 5", "5", True),
        ("f(2) = 6", "5", False),
        ("x = 2y", "2y", True),
        ("x + 1 = 2y", "2y", True),
        ("5", "x = 5", True),
        ("6", "x = 5", False),
        ("5", "f(2) = 5", True),
        ("2y", "x = 2y", True),
        ("5", "x + 1 = 5", False),  # not the value of x
        ("5", "x = y = 5", True),
        ("x", "x = 5", False),
        # equations are the same if one is a multiple of the other
        ("y = 2x + 1", "2x - y + 1 = 0", True),
        ("2y = 4x + 2", "y = 2x + 1", True),
        ("y = 2x - 1", "y = 2x + 1", False),
        ("y = -2x - 1", "y = 2x + 1", False),
        ("x^2 + y^2 = 25", "25 - y^2 = x^2", True),
        ("x^2 + y^2 = 5", "x^2 + y^2 = 25", False),
        ("xy = 1", "x = 1", False),
        ("x = 1", "xy = 1", False),
        ("x y = x", "x y = y", False),
        ("y = x^2", "y = x", False),
        ("y = |x|", "y = x", False),
        ("x = 5", "x = 5", True),
        ("x = 5", "y = 5", False),
        ("x = 6", "x = 5", False),
        ("x = 10/2", "x = 5", True),
        ("x = 5, y = 6", "x = 5, y = 6", True),
        ("x = 5, y = 6", "x = 5, y = 7", False),
        ("(1, 2)", "(1, \\frac{4}{2})", True),
        ("A = \\begin{pmatrix}1&2\\end{pmatrix}", "A = \\begin{pmatrix}1&\\frac{4}{2}\\end{pmatrix}", True),
        ("A = \\begin{pmatrix}1&2\\end{pmatrix}", "A = \\begin{pmatrix}1&3\\end{pmatrix}", False),
        ("A = \\begin{pmatrix}1&2\\end{pmatrix}", "B = \\begin{pmatrix}1&2\\end{pmatrix}", False),
        ("A = \\begin{pmatrix}1&2\\end{pmatrix}", "A = 5", False),
        ("A = 5", "A = \\begin{pmatrix}1&2\\end{pmatrix}", False),
        ("x \\in (1, 2)", "(1, 2)", True),
        ("x > 5", "x > 5", True),
        ("x > 5", "x = 5", False),
        ("x = 5", "x > 5", False),
        ("5", "x > 5", False),
        ("5 < x < 6", "(5, 6)", True),
        ("5 < x < 7", "(5, 6)", False),
    ],
)
def test_equations(answer, truth, expected):
    assert same(of(answer), of(truth)) is expected


@pytest.mark.parametrize("place", range(3))
def test_an_equation_needs_three_points_with_a_value(place):
    """At a root of both sides there is no ratio."""
    left = sympy.prod(x - point for point in _POINTS[: place + 1])
    assert same(Eq(2 * left, 0), Eq(left, 0)) is (place < 2)


@pytest.mark.parametrize(
    ("answer", "truth", "tolerance", "expected"),
    [
        ("2.52", "2.5", 0.01, True),
        ("2.525", "2.5", 0.01, True),
        ("3.75", "2.5", 0.5, True),
        ("2.53", "2.5", 0.01, False),
        ("2.48", "2.5", 0.01, True),
        ("-2.5", "2.5", 0.01, False),
        ("0.2525", "0.25", 0.01, True),
        ("0.26", "0.25", 0.01, False),
        ("2.52", "2.5", 0.0, False),
        ("\\pi", "3.14", 0.01, True),
        ("3.14", "\\pi", 0.01, False),  # the truth is no decimal
        ("2.52", "\\frac{5}{2}", 0.01, False),
        ("x = 2.52", "2.5", 0.01, True),
        ("2.52x", "2.5x", 0.01, False),
    ],
)
def test_a_tolerance_is_for_a_truth_that_is_a_decimal(answer, truth, tolerance, expected):
    assert same(of(answer), of(truth), tolerance=tolerance) is expected


def test_without_a_tolerance_a_decimal_is_exact():
    assert same(Float("2.52"), Float("2.5")) is False


def test_what_costs_too_much_is_not_compared():
    tower = sympy.Pow(9, 10**6, evaluate=False)
    for pair in ((tower, Integer(5)), (Integer(5), tower)):
        with pytest.raises(TooCostlyError):
            same(*pair)
