r"""Cost bounds of expressions: what is evaluated, what is refused, and where exactly the border is."""

from __future__ import annotations

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from sympy import Add, Float, Integer, Matrix, Mul, Pow, Product, Rational, Sum, cos, exp, factorial, oo, pi
from sympy.abc import j, k, n, x, y

from agentrl.extras.answers.bounds import (
    MAX_BITS,
    MAX_CHARS,
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_NODES,
    MAX_SYMBOLIC_POWER,
    MAX_TERMS,
    check_prose,
    check_text,
    check_tree,
)
from agentrl.extras.answers.cpu_limit import TooCostlyError


def is_costly(check, checked) -> bool:
    try:
        check(checked)
    except TooCostlyError:
        return True
    return False


def nested(depth: int, brackets: str = "()") -> str:
    return brackets[0] * depth + "2" + brackets[1] * depth


def pmatrix(inside: str) -> str:
    return rf"\begin{{pmatrix}}{inside}\end{{pmatrix}}"


# ----------------------------------------------------------------------------------------------------- limits


def test_an_answer_of_usual_size_is_within_every_limit():
    assert not is_costly(check_text, "+".join(["12345678901234567890"] * 10))
    assert not is_costly(check_text, nested(3))
    assert not is_costly(check_tree, Add(*sympy.symbols("a:60")))
    assert not is_costly(check_tree, Sum(k**2, (k, 1, 100)))
    assert not is_costly(check_tree, Pow(2, 1000, evaluate=False))
    assert not is_costly(check_tree, (x + y) ** 30)


def test_an_answer_of_monstrous_size_is_beyond_every_limit():
    assert is_costly(check_text, "1+" * 1000)
    assert is_costly(check_text, "1" * 200)
    assert is_costly(check_text, nested(20))
    assert is_costly(check_tree, Add(*sympy.symbols("a:2000")))
    assert is_costly(check_tree, Sum(k**2, (k, 1, 10**4)))
    assert is_costly(check_tree, Pow(2, 10**5, evaluate=False))
    assert is_costly(check_tree, (x + y) ** 1000)


# ------------------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("within", "beyond"),
    [
        (("1+" * MAX_CHARS)[:MAX_CHARS], ("1+" * MAX_CHARS)[: MAX_CHARS + 1]),
        ("1" * MAX_DIGITS, "1" * (MAX_DIGITS + 1)),
        ("1" * MAX_DIGITS + "." + "1" * MAX_DIGITS, "1." + "1" * (MAX_DIGITS + 1)),
        *((nested(MAX_DEPTH, kind), nested(MAX_DEPTH + 1, kind)) for kind in ("()", "{}", "[]")),
        (
            r"\lfloor" * MAX_DEPTH + "2" + r"\rfloor" * MAX_DEPTH,
            r"\lfloor" * (MAX_DEPTH + 1) + "2",
        ),
        ("(1)" * 20, "(1)" * 20 + "(" * (MAX_DEPTH + 1)),
        ("))))" + "(" * MAX_DEPTH, "))))" + "(" * (MAX_DEPTH + 1)),
        ("((((1)" + "(" * (MAX_DEPTH - 3), "((((1)" + "(" * (MAX_DEPTH - 2)),
        ("|" * MAX_DEPTH, "|" * (MAX_DEPTH + 1)),
        (r"\binom{10}{5}", r"\binom{1000}{5}"),
        (r"\binom{10}{5}+\dbinom{n}{k}", r"\binom{10}{5}+\dbinom{n}{1000}"),
        (r"\binom 52", r"\binom{\binom{10}{5}}{5}"),
        (r"\binom{10}{5}", r"{10 \choose 5}"),
        (r"\binom{10}{5}", r"\binom{10}{5} + {10 \choose 5}"),
        (r"\binom{10}{5}", r"{10\over5}"),
        ("C", "C(10,5)"),
        (r"\gcd(12, 999)", r"\gcd(12, 1000)"),
        (r"\gcd(12, 18)", r"\gcd(12^2, 18)"),
        (r"\max(3, 4)", r"\max(3!, 4)"),
        (r"\max(3*4)", r"\max(3**4)"),
        ("2^{30} + 4!", r"\det(2^{30})"),
        ("2^{3^{4}}", "2^{3^{4^{5}}}"),
        (pmatrix("&" * 50), pmatrix("&" * 51)),
        (pmatrix(r"\\" * 50), pmatrix(r"\\" * 51)),
        (pmatrix("&" * 25 + r"\\" * 25), pmatrix("&" * 25 + r"\\" * 26)),
        (pmatrix(r"1&2\\3&4") + "^{2}", pmatrix(r"1&2\\3&4") + "^{22}"),
        (pmatrix("1&2") + "^T", pmatrix("1&2") + "^n"),
        (pmatrix("1&2") + "^{-1}", pmatrix("1&2") + "^{-10}"),
    ],
)
def test_the_border_of_what_the_parser_may_read(within, beyond):
    assert not is_costly(check_text, within)
    assert is_costly(check_text, beyond)


@pytest.mark.parametrize(
    ("text", "costly"),
    [
        ("So it is $2^{10}$, or 1024.", False),
        ("So it is 2^{10} = 1024, and ((3)).", False),
        ("1+" * MAX_CHARS, False),  # only mathematics is parsed as a whole
        (f"${'1+' * MAX_CHARS}$", True),
        (f"${'1+' * MAX_CHARS}", True),
        (f"First $1$, then ${nested(MAX_DEPTH + 1)}$.", True),
        (rf"\[{nested(MAX_DEPTH + 1)}\]", True),
        (rf"\({nested(MAX_DEPTH + 1)}\)", True),
        (f"$${nested(MAX_DEPTH + 1)}$$", True),
        (f"It is {nested(MAX_DEPTH)}.", False),
        (f"It is {nested(MAX_DEPTH + 1)}.", True),
        (f"$({'$ 2 $('}" * MAX_DEPTH, False),  # each piece on its own
        (f"It is {'1' * MAX_DIGITS}.", False),
        (f"It is {'1' * (MAX_DIGITS + 1)}.", True),
        ("It is 9^99.", False),
        ("It is 9^999.", True),
        ("It is 9**999.", True),
        ("It is 9^9^9.", True),
    ],
)
def test_each_piece_of_a_response_is_bounded(text, costly):
    assert is_costly(check_prose, text) is costly


# ------------------------------------------------------------------------------------------------------- tree


def power(base, exponent) -> sympy.Expr:
    return Pow(base, exponent, evaluate=False)


def times(*factors) -> sympy.Expr:
    return Mul(*factors, evaluate=False)


def plus(*terms) -> sympy.Expr:
    return Add(*terms, evaluate=False)


LARGEST = 2**MAX_BITS - 1
"""The largest integer."""


@pytest.mark.parametrize(
    ("within", "beyond"),
    [
        (Integer(LARGEST), Integer(LARGEST + 1)),
        (Integer(-LARGEST), Integer(-LARGEST - 1)),
        (Rational(1, LARGEST), Rational(1, LARGEST + 2)),
        # 53 bits of a float's digits and its exponent
        (Float(2) ** (MAX_BITS - 53), Float(2) ** (MAX_BITS - 52)),
        (Float("0.1"), Float("1e-3000")),
        (Add(*sympy.symbols(f"a:{MAX_NODES}")), Add(*sympy.symbols(f"a:{MAX_NODES + 1}"))),
        (plus(Integer(LARGEST >> 2), 1), plus(Integer(LARGEST >> 1), 1)),
        (plus(1, x, Integer(LARGEST >> 3)), plus(1, x, Integer(LARGEST >> 2))),
        (
            times(Integer(LARGEST >> 4000), Integer(2**3999)),
            times(Integer(LARGEST >> 4000), Integer(2**4000)),
        ),
        (times(x, Integer(LARGEST >> 1)), times(x, Integer(LARGEST))),
        (cos(Integer(LARGEST >> 1), evaluate=False), cos(Integer(LARGEST), evaluate=False)),
        # a power: bits of the base, times the exponent and one
        (power(2, MAX_BITS // 2 - 1), power(2, MAX_BITS // 2)),
        (power(2, 1 - MAX_BITS // 2), power(2, -MAX_BITS // 2)),
        (power(2, power(2, 3)), power(2, power(3, 9))),
        (power(3, Float("0.5")), power(3, Float("5000.5"))),
        (power(2, Rational(1, MAX_TERMS)), power(2, Rational(1, MAX_TERMS + 1))),
        (power(2, times(pi, 2**10)), power(2, times(pi, 2**11))),
        (power(Integer(LARGEST >> 1), x), power(Integer(LARGEST), x)),
        (power(x, 2**14 - 1), power(x, 2**14)),
        (power(x + 1, MAX_SYMBOLIC_POWER), power(x + 1, MAX_SYMBOLIC_POWER + 1)),
        (times(power(x, 999), Integer(LARGEST >> 1)), times(power(x, 999), Integer(LARGEST))),
        (exp(5), exp(MAX_BITS)),
        (exp(MAX_BITS - 1), exp(2**14)),
        # functions that grow like factorials
        *((kind(511, evaluate=False), kind(512, evaluate=False)) for kind in (factorial, sympy.gamma)),
        (sympy.factorial2(511, evaluate=False), sympy.factorial2(512, evaluate=False)),
        (sympy.subfactorial(511, evaluate=False), sympy.subfactorial(512, evaluate=False)),
        (factorial(x), factorial(factorial(9, evaluate=False), evaluate=False)),
        (
            times(factorial(300, evaluate=False), factorial(301, evaluate=False)),
            times(factorial(300, evaluate=False), factorial(301, evaluate=False), 2),
        ),
        # sums and products
        (Sum(k, (k, 1, MAX_TERMS)), Sum(k, (k, 1, MAX_TERMS + 1))),
        (Sum(k, (k, 151, 150 + MAX_TERMS)), Sum(k, (k, -150, 150))),
        (Sum(k, (k, MAX_TERMS, 1)), Sum(k, (k, MAX_TERMS + 1, 1))),
        (Sum(j * k, (j, 1, 10), (k, 1, MAX_TERMS // 10)), Sum(j * k, (j, 1, 11), (k, 1, MAX_TERMS // 10))),
        (Sum(k, (k, 1, 3)), Sum(k, (k, 1, oo))),
        (Sum(k, (k, 1, 3)), Sum(k, (k, 1, n))),
        (Sum(k, (k, 1, 3)), Sum(k, (k, n, 3))),
        (Sum(Integer(LARGEST >> 3), (k, 1, 7)), Sum(Integer(LARGEST >> 3), (k, 1, 8))),
        (Product(Integer(2**40), (k, 1, 199)), Product(Integer(2**41), (k, 1, 199))),
        (Product(k, (k, 1, MAX_TERMS)), Product(k, (k, 1, MAX_TERMS + 1))),
        (Product(k, (k, 3, 1)), Product(k, (k, 10**9, 1))),
        # what sympy would have to work out
        (x**2, sympy.Integral(x, x)),
        (x**2, sympy.Derivative(x**2, x)),
        (x**2, sympy.Limit(1 / x, x, oo)),
        (cos(x), cos(sympy.Integral(x, x))),
        (Matrix([[1, 2], [3, 4]]), Matrix([[1, 2], [3, power(2, 10**5)]])),
        (sympy.ImmutableMatrix([[1, 2]]), sympy.ImmutableMatrix([[1, power(2, 10**5)]])),
        (sympy.Tuple(1, 2), sympy.Tuple(1, power(2, 10**5))),
        (sympy.Eq(x, 5), sympy.Eq(x, power(2, 10**5))),
    ],
)
def test_the_border_of_what_is_evaluated(within, beyond):
    assert not is_costly(check_tree, within)
    assert is_costly(check_tree, beyond)


def test_words_cost_nothing():
    for found in ("yes", "9^" * 1000, None):
        assert not is_costly(check_tree, found)


INTEGERS = st.recursive(
    st.integers(0, 2**60).map(Integer) | st.integers(0, 20).map(Integer),
    lambda inner: (
        st.lists(inner, min_size=2, max_size=4).map(lambda terms: plus(*terms))
        | st.lists(inner, min_size=2, max_size=4).map(lambda factors: times(*factors))
        | st.builds(power, inner, st.integers(1, 200).map(Integer))
        | st.integers(0, 600).map(lambda of: factorial(of, evaluate=False))
        | st.builds(lambda of, num: Product(plus(of, k), (k, 1, num)), inner, st.integers(1, 250))
        | st.builds(lambda of, num: Sum(times(of, k), (k, 1, num)), inner, st.integers(1, 250))
    ),
    max_leaves=6,
)


@given(INTEGERS)
@settings(max_examples=60, deadline=None)
def test_whatever_passes_is_a_number_of_so_many_bits(tree):
    if not is_costly(check_tree, tree):
        assert int(tree.doit()).bit_length() <= MAX_BITS
