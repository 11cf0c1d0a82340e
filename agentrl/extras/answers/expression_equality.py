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

from agentrl.extras.answers.bounds import check_tree

_NUM_DIGITS = 150
_NUM_AGREEING = 110
"""A decimal of up to 50 digits, or a quotient of two, is never within 1e-100 of a different irrational
number.
"""
_NEGLIGIBLE = sympy.Float(f"1e-{_NUM_AGREEING}")
_POINTS = tuple(map(sympy.Rational, ("17/7", "-13/11", "5/19", "101/13", "-3/23")))
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


def _same(answer: Any, truth: Any, tolerance: float = 0.0) -> bool:
    if (
        isinstance(answer, sympy.Expr)
        and isinstance(truth, sympy.Expr)
        and not _is_matrix(answer)
        and not _is_matrix(truth)
    ):
        return _same_scalars(answer, truth, tolerance)
    if isinstance(answer, sympy.Eq) and isinstance(truth, sympy.Eq):
        return _same_equations(answer, truth)
    if type(answer) is type(truth) and (elements := _elements(truth)) is not None:
        is_ordered = not isinstance(truth, sympy.FiniteSet)
        return _same_elements(_elements(answer) or [], elements, is_ordered=is_ordered)
    return bool(
        verify(
            truth,
            answer,
            float_rounding=_NUM_AGREEING,
            numeric_precision=_NUM_AGREEING,
            timeout_seconds=None,
            allow_set_relation_comp=True,
        )
    )


def _same_scalars(answer: Any, truth: Any, tolerance: float) -> bool:
    if answer == truth:
        return True
    if not _has_variables_of(truth, answer):
        return False
    symbols = answer.free_symbols | truth.free_symbols
    if not symbols:
        return _same_values(_value(answer), _value(truth), tolerance)
    num_agreeing = 0
    for values in _substitutions(symbols):
        one, other = _value(answer.subs(values)), _value(truth.subs(values))
        if one is None or other is None:
            continue
        if not _same_values(one, other):
            return False
        num_agreeing += 1
    return num_agreeing >= _MIN_POINTS


def _has_variables_of(truth: Any, answer: Any) -> bool:
    if truth.free_symbols:
        return bool(answer.free_symbols) and answer.free_symbols <= truth.free_symbols
    return not answer.free_symbols or answer.has(TrigonometricFunction)  # sin^2 x + cos^2 x may be 1


def _same_equations(answer: Any, truth: Any) -> bool:
    """Return whether one equation is a multiple of the other."""
    if not all(
        isinstance(side, sympy.Expr) and not _is_matrix(side)
        for side in (answer.lhs, answer.rhs, truth.lhs, truth.rhs)
    ):
        return bool(answer.lhs == truth.lhs) and _same(answer.rhs, truth.rhs)
    if answer.free_symbols != truth.free_symbols:
        return False
    one, other = answer.lhs - answer.rhs, truth.lhs - truth.rhs
    ratios = []
    for values in _substitutions(truth.free_symbols):
        above, below = _value(one.subs(values)), _value(other.subs(values))
        if above and below:
            ratios.append(above / below)
    return len(ratios) >= _MIN_POINTS and all(_same_values(*pair) for pair in pairwise(ratios))


def _same_elements(answers: Sequence[Any], truths: Sequence[Any], *, is_ordered: bool) -> bool:
    if len(answers) != len(truths):
        return False
    left = list(answers)
    for truth in truths:
        found = next((i for i, one in enumerate(left[:1] if is_ordered else left) if _same(one, truth)), None)
        if found is None:
            return False
        del left[found]
    return True


def _same_values(one: Any, other: Any, tolerance: float = 0.0) -> bool:
    if one is None or other is None:
        return False
    if tolerance:
        return bool(abs(one - other) <= tolerance * abs(other))
    if one.is_Rational and other.is_Rational:
        return bool(one == other)
    return bool(abs(one - other) <= min(abs(other), sympy.S.One) * _NEGLIGIBLE)


def _value(constant: Any) -> Any:
    """Evaluate a constant to _NUM_DIGITS digits, real or complex; None if it has no finite value."""
    worked_out = constant.doit()
    if isinstance(worked_out, sympy.Rational):
        return worked_out
    value = _decimal(worked_out, _NUM_DIGITS)
    if value.is_Float and (whole := int(abs(value))):  # large numbers need the digits after the point as well
        value = _decimal(worked_out, _NUM_DIGITS + len(str(whole)))
    parts = value.as_real_imag()
    if not all(isinstance(part, sympy.Float | sympy.Rational) for part in parts):
        return None
    real, imaginary = (sympy.S.Zero if abs(part) < _NEGLIGIBLE else part for part in parts)
    return real + sympy.I * imaginary


def _decimal(constant: Any, num_digits: int) -> Any:
    return constant.evalf(num_digits, maxn=2 * num_digits)


def _substitutions(symbols: set[Any]) -> list[dict[Any, Any]]:
    ordered = sorted(symbols, key=str)
    return [
        {symbol: _POINTS[(point + index) % len(_POINTS)] + index for index, symbol in enumerate(ordered)}
        for point in range(len(_POINTS))
    ]


def _exact(tree: Any) -> Any:
    """Return the tree with decimals as exact fractions and i as the imaginary unit."""
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
    return bool(base.is_Rational and base.is_negative and exponent.is_Rational and exponent.q % 2)


def _real_root(power: Any) -> Any:
    base, exponent = power.args
    return (-1) ** exponent.p * sympy.Pow(-base, exponent)


def _is_equation(tree: Any) -> bool:
    return isinstance(tree, sympy.Eq) or (
        isinstance(tree, And) and all(isinstance(one, sympy.Eq) for one in _parts(tree))
    )


def _is_assignment(tree: Any) -> bool:
    left = _parts(tree)[0].lhs
    return bool(left.is_Symbol or left.is_Function)


def _value_of(equation: Any) -> Any:
    """Return the value that an equation states: 5 for `x = 5`, `5 = x` and `2 + 3 = 5`.

    None for `41 = 42` and `x = 4 = 5`.
    """
    parts = _parts(equation)
    sides = [parts[0].lhs, *(part.rhs for part in parts)]
    fixed = [side for side in sides if _is_constant(side)]
    if not all(_same_values(_value(one), _value(other)) for one, other in pairwise(fixed)):
        return None
    return sides[0] if sides[-1].is_Symbol and not sides[0].is_Symbol else sides[-1]


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
