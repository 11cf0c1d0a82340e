"""Equality of parsed expressions.

Rational numbers are compared exactly, others to 110 digits, and expressions with variables at fixed points.
Everything else is compared structurally. Nothing is simplified: expressions that differ will differ at the
first point, and those that agree at all points are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import sympy
from latex2sympy2_extended.logic import And
from math_verify import verify
from sympy.core.function import AppliedUndef
from sympy.functions.elementary.trigonometric import TrigonometricFunction

from agentrl.rewards.bounds import check_tree

_NUM_DIGITS, _NUM_AGREEING = 150, 110
"""A decimal of up to 50 digits, or a quotient of two, is never within 1e-100 of a different irrational
number.
"""
_POINTS = tuple(sympy.Rational(*pair) for pair in ((17, 7), (-13, 11), (5, 19), (101, 13), (-3, 23)))
_MIN_POINTS = 3
_IMAGINARY = ("i", "\\imath")


def same(answer: Any, truth: Any, *, tolerance: float = 0.0) -> bool:
    """Return whether a parsed answer equals the truth.

    tolerance: relative; it applies only to a truth that is a decimal.

    Raises:
        TooCostlyError: the comparison would take too long.
    """
    check_tree(answer)
    check_tree(truth)
    is_text = isinstance(answer, str), isinstance(truth, str)
    if any(is_text):
        return all(is_text) and bool(truth.strip()) and answer.strip() == truth.strip()
    is_decimal = isinstance(truth, sympy.Float)
    answer, truth = (_exact(one) for one in (answer, truth))
    if _is_equation(answer) and not _is_equation(truth):
        found = _value_of(answer)
        if found is None:
            return False
        answer = found
    elif _is_equation(truth) and not _is_equation(answer) and isinstance(answer, sympy.Expr):
        truth = _value_of(truth) if _is_assignment(truth) else truth
    return _same(answer, truth, tolerance if is_decimal else 0.0)


def _same(answer: Any, truth: Any, tolerance: float) -> bool:
    if (
        isinstance(answer, sympy.Expr)
        and isinstance(truth, sympy.Expr)
        and not _is_matrix(answer)
        and not _is_matrix(truth)
    ):
        return _same_scalars(answer, truth, tolerance)
    if isinstance(answer, sympy.Eq) and isinstance(truth, sympy.Eq):
        return _same_equations(answer, truth)
    elements = _elements(answer), _elements(truth)
    if elements[0] is not None and elements[1] is not None and type(answer) is type(truth):
        return _same_elements(elements[0], elements[1], is_ordered=not isinstance(truth, sympy.FiniteSet))
    return bool(
        verify(
            truth,
            answer,
            float_rounding=100,
            numeric_precision=100,
            timeout_seconds=None,
            allow_set_relation_comp=True,
        )
    )


def _same_scalars(answer: Any, truth: Any, tolerance: float) -> bool:
    symbols = answer.free_symbols | truth.free_symbols
    if answer == truth:
        return True
    has_other_symbols = bool(answer.free_symbols - truth.free_symbols) or bool(
        truth.free_symbols and not answer.free_symbols
    )
    # sin^2 x + cos^2 x may be 1
    if has_other_symbols and (truth.free_symbols or not _is_trigonometric(answer)):
        return False
    if not symbols:
        return _same_values(_value(answer), _value(truth), tolerance)
    num_agreeing = 0
    for values in _substitutions(symbols):
        one, other = _value(answer.subs(values)), _value(truth.subs(values))
        if one is None and other is None:
            continue
        if not _same_values(one, other, 0.0):
            return False
        num_agreeing += 1
    return num_agreeing >= _MIN_POINTS


def _same_equations(answer: Any, truth: Any) -> bool:
    """Return whether one equation is a multiple of the other."""
    one, other = answer.lhs, truth.lhs
    if not all(
        isinstance(side, sympy.Expr) and not _is_matrix(side) for side in (one, other, answer.rhs, truth.rhs)
    ):
        return bool(one == other) and _same(answer.rhs, truth.rhs, 0.0)
    one, other = one - answer.rhs, other - truth.rhs
    symbols = truth.free_symbols
    if answer.free_symbols != symbols or not symbols:
        return False
    ratios = []
    for values in _substitutions(symbols):
        above, below = _value(one.subs(values)), _value(other.subs(values))
        if above is not None and below is not None and abs(below) > 1e-50 and abs(above) > 1e-50:
            ratios.append(above / below)
    return len(ratios) >= _MIN_POINTS and all(_same_values(ratio, ratios[0], 0.0) for ratio in ratios)


def _same_elements(answers: Sequence[Any], truths: Sequence[Any], *, is_ordered: bool) -> bool:
    if len(answers) != len(truths):
        return False
    left = list(answers)
    for truth in truths:
        found = next(
            (i for i, one in enumerate(left[:1] if is_ordered else left) if _same(one, truth, 0.0)), None
        )
        if found is None:
            return False
        del left[found]
    return True


def _same_values(one: Any, other: Any, tolerance: float) -> bool:
    if one is None or other is None:
        return False
    if tolerance:
        return bool(abs(one - other) <= tolerance * abs(other))
    if one.is_Rational and other.is_Rational:
        return bool(one == other)
    scale = min(max(abs(one), abs(other)), sympy.Integer(1))
    return bool(abs(one - other) <= scale * sympy.Float(10, 20) ** -_NUM_AGREEING)


def _value(constant: Any) -> Any:
    """Evaluate a constant to _NUM_DIGITS digits, real or complex; None if it has no finite value."""
    if isinstance(constant, sympy.Rational):
        return constant
    worked_out = constant.doit()
    if isinstance(worked_out, sympy.Rational):
        return worked_out
    num_digits = _NUM_DIGITS
    value = worked_out.evalf(num_digits, maxn=2 * num_digits, chop=False)
    if value.is_Float and abs(value) > 1:  # large numbers need the digits after the point as well
        num_digits += int(sympy.log(abs(value), 10).evalf(5))
        value = worked_out.evalf(num_digits, maxn=2 * num_digits, chop=False)
    parts = value.as_real_imag()
    if not all(part.is_number and part.is_finite and (part.is_Float or part.is_Rational) for part in parts):
        return None
    real, imaginary = (
        sympy.Integer(0) if abs(part) < sympy.Float(10, 20) ** -_NUM_AGREEING else part for part in parts
    )
    return real + sympy.I * imaginary


def _substitutions(symbols: set[Any]) -> list[dict[Any, Any]]:
    ordered = sorted(symbols, key=str)
    return [
        {
            symbol: _POINTS[(point + index) % len(_POINTS)] + sympy.Rational(index, 3)
            for index, symbol in enumerate(ordered)
        }
        for point in range(len(_POINTS))
    ]


def _exact(tree: Any) -> Any:
    """Return the tree with decimals as exact fractions and i as the imaginary unit."""
    if not hasattr(tree, "atoms"):
        return tree
    values: dict[Any, Any] = {number: sympy.Rational(str(number)) for number in tree.atoms(sympy.Float)}
    values |= {symbol: sympy.I for symbol in tree.atoms(sympy.Symbol) if symbol.name in _IMAGINARY}
    tree = tree.xreplace(values) if values else tree
    roots = {power: _real_root(power) for power in tree.atoms(sympy.Pow) if _is_odd_root(power)}
    return tree.xreplace(roots) if roots else tree


def _is_odd_root(power: Any) -> bool:
    """Return whether a power is an odd root of a negative number, like (-8)^(1/3): contests mean the real
    root.
    """
    base, exponent = power.args
    return bool(base.is_Rational and base < 0 and exponent.is_Rational and exponent.q > 1 and exponent.q % 2)


def _real_root(power: Any) -> Any:
    base, exponent = power.args
    return (-1) ** exponent.p * sympy.Pow(-base, exponent)


def _is_trigonometric(tree: Any) -> bool:
    """Return whether all variables of an expression are arguments of trigonometric functions."""
    functions = tree.atoms(TrigonometricFunction)
    hidden = tree.xreplace({function: sympy.Integer(1) for function in functions})
    return bool(functions) and not hidden.free_symbols


def _is_equation(tree: Any) -> bool:
    return isinstance(tree, sympy.Eq) or (
        isinstance(tree, And) and all(isinstance(one, sympy.Eq) for one in _parts(tree))
    )


def _is_assignment(tree: Any) -> bool:
    left = _parts(tree)[0].lhs
    return bool(getattr(left, "is_Symbol", False)) or bool(getattr(left, "is_Function", False))


def _value_of(equation: Any) -> Any:
    """Return the value that an equation states: 5 for `x = 5` and `2 + 3 = 5`; None for `41 = 42`, `x = 4 =
    5`.
    """
    parts = _parts(equation)
    sides = [parts[0].lhs, *(part.rhs for part in parts)]
    if (
        len(sides) == 2
        and getattr(sides[1], "is_Symbol", False)
        and not getattr(sides[0], "is_Symbol", False)
    ):
        return sides[0]
    fixed = [side for side in sides if _is_constant(side)]
    if any(not _same_values(_value(one), _value(other), 0.0) for one, other in pairwise(fixed)):
        return None
    return sides[-1]


def _parts(tree: Any) -> Sequence[Any]:
    return list(tree._unsorted_args) if isinstance(tree, And) else [tree]


def _elements(tree: Any) -> list[Any] | None:
    """Return the elements of a tuple or finite set, or a matrix's shape and elements; None for all else."""
    if isinstance(tree, sympy.MatrixBase):
        return [*map(sympy.Integer, tree.shape), *tree.flat()]
    return list(tree.args) if isinstance(tree, sympy.Tuple | sympy.FiniteSet) else None


def _is_constant(tree: Any) -> bool:
    return (
        isinstance(tree, sympy.Expr)
        and not _is_matrix(tree)
        and not tree.free_symbols
        and not tree.atoms(AppliedUndef)
    )


def _is_matrix(tree: Any) -> bool:
    return isinstance(tree, sympy.MatrixBase | sympy.MatrixExpr)
