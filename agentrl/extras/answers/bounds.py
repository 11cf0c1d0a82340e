r"""Cost bounds of expressions: on the text before sympy parses it, and on the tree before sympy evaluates it.

A model learns whatever pays, including answers that hang the checker. `9^{9^{9^{9}}}`,
`\binom{20000}{10000}`, `\prod_{n=1}^{10^9} n` and `((((2))))` are short to write but take forever to
evaluate.
"""

from __future__ import annotations

import re
from typing import Any

import sympy

from agentrl.extras.answers.cpu_limit import TooCostlyError

MAX_CHARS = 400
MAX_DEPTH = 6
"""Nesting of brackets: the parser's time is exponential in it."""
MAX_DIGITS = 50
MAX_NODES = 250
MAX_BITS = 8192
"""Bits of any intermediate number, 2,466 decimal digits: fewer than Python's limit for int to str."""
MAX_TERMS = 200
MAX_SYMBOLIC_POWER = 64

_OPENING = re.compile(r"[{(\[]|\\(?:lfloor|lceil|langle|lvert|begin)(?![a-zA-Z])")
_CLOSING = re.compile(r"[})\]]|\\(?:rfloor|rceil|rangle|rvert|end)(?![a-zA-Z])")
_BRACKET = re.compile(rf"(?P<opening>{_OPENING.pattern})|(?P<closing>{_CLOSING.pattern})")
_DIGITS = re.compile(rf"[0-9]{{{MAX_DIGITS + 1}}}")
_EAGER = re.compile(
    r"\\?(?:gcd|lcm|max|min|[bp]?mod|det|trace|tr|rank|adj|inv|rref|ker|GramSchmidt|Gamma|zeta)(?![a-z])"
)
_BINOMIAL = re.compile(
    r"\\[dt]?binom|\\choose|\\(?:at)?over(?:withdelims)?(?![a-zA-Z])|\bchoose\b|(?<![a-zA-Z])[CP]\(|_\{?[0-9]+\}?[CP]_|[CP]_\{?[0-9]"
)
_BINOMIAL_OF = re.compile(
    r"\\[dt]?binom\s?(?:\{[A-Za-z0-9+\- ]{1,12}\}\s?\{[A-Za-z0-9+\- ]{1,12}\}|[0-9a-z]\s?[0-9a-z])"
)
_TOWER = re.compile(r"\^\s?\{[^{}]*\^\s?\{[^{}]*\^")
_LONG_INTEGER = re.compile(r"[0-9]{4}")
_MATRIX_POWER = re.compile(
    r"matrix\}\s?(?:\\right.)?\s?\^(?!\s?\{?\s?(?:T|-1|[0-9])\s?\}?(?![0-9]))|array\}\s?(?:\\right.)?\s?\^"
)
_MATHEMATICS = re.compile(
    r"\$\$[^$]*(?:\$\$|\Z)|\$[^$]*(?:\$|\Z)|\\\[.*?(?:\\\]|\Z)|\\\(.*?(?:\\\)|\Z)", re.DOTALL
)
_PLAIN_POWER = re.compile(r"[0-9a-z)]\s?(?:\^|\*\*)\s?[({]?\s?-?(?:[0-9]{3}|[0-9(][^\s$]{0,20}(?:\^|\*\*))")
_WHOLE = (sympy.Integral, sympy.Derivative, sympy.Limit)


def check_text(text: str) -> None:
    """Raise TooCostlyError unless the parser can read `text` in a fraction of a second."""
    if len(text) > MAX_CHARS or _DIGITS.search(text):
        raise TooCostlyError(
            f"longer than {MAX_CHARS} characters, or a number of more than {MAX_DIGITS} digits"
        )
    _check_depth(text)
    binomials = _BINOMIAL_OF.findall(text)
    # The parser evaluates binomials while it parses.
    if len(_BINOMIAL.findall(text)) > len(binomials) or any(map(_LONG_INTEGER.search, binomials)):
        raise TooCostlyError("a binomial of more than three digits")
    if _EAGER.search(text) and ("^" in text or "!" in text or "**" in text or _LONG_INTEGER.search(text)):
        raise TooCostlyError("a function of a power, a factorial or a number of more than three digits")
    if _TOWER.search(text) or text.count("|") > MAX_DEPTH:
        raise TooCostlyError("a tower of powers, or of absolute values")
    if text.count("&") + text.count("\\\\") > MAX_TERMS // 4 or _MATRIX_POWER.search(text):
        raise TooCostlyError("a large matrix, or a power of one")


def check_prose(text: str) -> None:
    """Raise TooCostlyError unless the parser can read each piece of mathematics in a response."""
    for piece in _MATHEMATICS.finditer(text):
        check_text(piece[0])
    between = _MATHEMATICS.sub(" ", text)
    _check_depth(between)
    if _DIGITS.search(between) or _PLAIN_POWER.search(between):
        raise TooCostlyError(f"a number of more than {MAX_DIGITS} digits")


def _check_depth(text: str) -> None:
    depth = 0
    for bracket in _BRACKET.finditer(text):
        depth = max(0, depth + (1 if bracket["opening"] else -1))
        if depth > MAX_DEPTH:
            raise TooCostlyError(f"brackets nested deeper than {MAX_DEPTH}")


def check_tree(tree: Any) -> None:
    """Raise TooCostlyError unless a parsed tree can be evaluated, with its powers, factorials and sums."""
    if isinstance(tree, sympy.MatrixBase):
        for element in tree.flat():
            check_tree(element)
        return
    if not isinstance(tree, sympy.Basic):
        return
    for count, node in enumerate(sympy.preorder_traversal(tree)):
        if count > MAX_NODES:
            raise TooCostlyError(f"more than {MAX_NODES} operations")
        if isinstance(node, _WHOLE):
            raise TooCostlyError(f"a {type(node).__name__.lower()} that is not worked out")
    _bits(tree)


def _bits(node: Any) -> float:
    """Return an upper bound of the bits of a number's value; symbols count as small."""
    bits = _bits_of(node)
    if bits > MAX_BITS:
        raise TooCostlyError(f"a number of more than {MAX_BITS} bits")
    return bits


def _bits_of(node: Any) -> float:
    if isinstance(node, sympy.Rational):
        return float(max(int(node.p).bit_length(), int(node.q).bit_length()))
    if isinstance(node, sympy.Float):
        return float(abs(sympy.Float(node)._mpf_[2]) + node._prec)
    if isinstance(node, sympy.Pow):
        return _bits_of_power(*node.args)
    if isinstance(node, sympy.exp):
        return _bits_of_power(sympy.E, node.args[0])
    if isinstance(node, sympy.factorial | sympy.factorial2 | sympy.gamma | sympy.subfactorial):
        return _bits_of_factorial(node.args[0])
    if isinstance(node, sympy.Sum | sympy.Product):
        return _bits_of_terms(node)
    sizes = [_bits(child) for child in getattr(node, "args", ())]
    if isinstance(node, sympy.Mul):
        return sum(sizes, 0.0)
    return max(sizes, default=1.0) + len(sizes)


def _bits_of_power(base: Any, exponent: Any) -> float:
    if isinstance(exponent, sympy.Float):  # 3^{0.5}: the length of its digits says nothing about its size
        exponent = sympy.Rational(str(exponent))
    size, power = _bits(base), _bits(exponent)
    if exponent.free_symbols:
        return size + power
    if power > 14:  # the exponent itself has more than 14 bits
        raise TooCostlyError("a power of more than 16,384")
    largest = float(2**power) if not isinstance(exponent, sympy.Rational) else float(abs(exponent)) + 1
    if isinstance(exponent, sympy.Rational) and exponent.q > MAX_TERMS:
        raise TooCostlyError("a root of a high degree")
    if base.free_symbols:
        if not base.is_Symbol and largest > MAX_SYMBOLIC_POWER + 1:
            raise TooCostlyError(f"a power of an expression of more than {MAX_SYMBOLIC_POWER}")
        return size
    return size * largest


def _bits_of_factorial(argument: Any) -> float:
    if argument.free_symbols:
        return _bits(argument)
    if _bits(argument) > 9:
        raise TooCostlyError("a factorial of more than 511")
    return 4096.0


def _bits_of_terms(node: Any) -> float:
    size, num_terms = _bits(node.function), 1
    for _, first, last in node.limits:
        if not (isinstance(first, sympy.Integer) and isinstance(last, sympy.Integer)):
            raise TooCostlyError("a sum or product whose bounds are not integers")
        num_terms *= abs(int(last - first)) + 1  # sympy also multiplies from 10^9 down to 1
    if num_terms > MAX_TERMS:
        raise TooCostlyError(f"a sum or product of more than {MAX_TERMS} terms")
    return size * num_terms if isinstance(node, sympy.Product) else size + num_terms.bit_length()
