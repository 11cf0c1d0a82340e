"""Answers that a policy might find which wants no reward but a failure: short to write, for ever to evaluate,
or malformed.

None is right, whatever its seed: the true values of the tests have digits that no answer here has.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

DIGITS = "2345689"
"""No 7 and no 1: no answer is 717 by accident."""
TRUTH = "717"

_OPEN_CLOSE = [
    "()",
    "[]",
    "{}",
    ("\\left(", "\\right)"),
    ("\\left[", "\\right]"),
    ("\\{", "\\}"),
    ("|", "|"),
    ("\\lfloor ", "\\rfloor "),
]
_PREFIXES = [
    "\\sqrt{", "\\frac{9}{", "x^{", "9^{", "e^{", "\\text{", "\\mathbf{", "\\boxed{", "\\sin(", "\\log_{2",
    "-(", "\\overline{", "_{",
    "\\binom{9}{",
    "\\sum_{n=2}^{9} (", "\\prod_{n=2}^{99} (", "\\left(", "\\begin{pmatrix}", "|", "{", "[", "**", "$",
    "\\cfrac{2}{2+",
]  # fmt: skip
_PIECES = [
    "1,", "9 ", "9.", "-", "- ", "=", "9=", "9+", "9/", "9^", "9!", "!", "(", "{", "\\", "\\\\", "$", "**",
    "####", "#### 9", "\n",
    "<think>",
    "</think>", "\\boxed{9", "\\boxed{", "\\frac", "\\text{", "answer is ", "wait ", "not ", "9 or ", "9 "
    "and ", "a ", "x ", "π", "½",
    "²", "₂",
    "٣", "\u200b", "\u202e", "\x00", "\ud800", "\U0001d7d7", "e9", "×10^9", "9:", ",999", " 999", "'999",
    ".999", "9%", "9 % of ",
    "9 dollars and ",
    "9 hours ", "forty ", "and a half ", "\\left", "\\right)", "&", "\\\\ 9", "~~9~~", "<9>", "9<", "≤",
    "\\ldots", "9_9", "^{^{",
    "\\infty", "i",
]  # fmt: skip


def hostile_answers(seed: int, num: int) -> Iterator[str]:
    """Yield `num` answers, the kinds in turn, each in a frame that asks a checker to read it."""
    rng = random.Random(seed)
    for index in range(num):
        inside = _KINDS[index % len(_KINDS)](rng)
        yield rng.choice(_FRAMES).replace("@", inside)


def _number(rng: random.Random, most: int = 6) -> str:
    return "".join(rng.choice(DIGITS) for _ in range(rng.randint(1, most)))


def _tower(rng: random.Random) -> str:
    base = rng.choice(["9", "x", "e", "(2+x)", "10", _number(rng)])
    depth = rng.randint(1, 12)
    return base + "".join("^{" + _number(rng, 9) for _ in range(depth)) + "}" * depth


def _plain_tower(rng: random.Random) -> str:
    return rng.choice(["**", "^"]).join(_number(rng, 9) for _ in range(rng.randint(2, 9)))


def _binomial(rng: random.Random) -> str:
    big = _number(rng, 9) + "0000"
    return rng.choice(
        ["\\binom{%s}{%s}", "\\dbinom{%s}{%s}", "{%s \\choose %s}", "C(%s,%s)", "\\tbinom{%s+2}{%s}"]
    ) % (
        big,
        _number(rng, 5),
    )


def _factorial(rng: random.Random) -> str:
    return rng.choice(["{}!", "({}!)!", "{}!!", "\\Gamma({})", "\\frac{{{0}!}}{{{0}!+2}}"]).format(
        _number(rng, 9) + "000"
    )


def _series(rng: random.Random) -> str:
    body = rng.choice(["n", "\\frac{2}{n}", "n^n", "n!", "\\sin(n^2)", "2^{n}"])
    end = rng.choice(["10^9", "10^{10^{9}}", "99999999", "\\infty", "9^{9^9}"])
    return rng.choice(["\\sum_{n=2}^{@} ", "\\prod_{n=2}^{@} "]).replace("@", end) + body


def _analysis(rng: random.Random) -> str:
    return rng.choice(
        [
            "\\int_0^{9} x^{x^x} dx", "\\int e^{-x^2}\\sin(x^9) dx", "\\lim_{x\\to 0} "
            "\\frac{\\sin(x^{x})}{x^{9}}",
            "\\frac{d}{dx} x^{x^{x^x}}",
            "\\int_0^\\infty \\frac{\\ln x}{x^{99}+2} dx", "\\sum_{n=2}^\\infty \\frac{2}{n^{9}}",
            "\\det(A^{99})",
            "\\sqrt[9999]{2}+\\sqrt[8888]{3}",
            "\\log_{2}{9^{99999999}}", "\\arctan(\\tan(9^{99999}))", "(x+y+z)^{9999}",
            "\\frac{x^{9999}-2}{x-2}", "\\cos(9^{9^{9}})",
            "\\zeta(9999)", "\\max(9^{9^9}, 2)", "9^{9^9} \\mod 8", "\\lfloor 9^{9^9} \\rfloor", "x^{9999} + "
            "x^{9998} = 2",
            "e^{e^{e^{e^{9}}}}",
        ]
    )  # fmt: skip


def _eager(rng: random.Random) -> str:
    big = rng.choice(["9^{9^9}", "99999!", "9^{99999999}", "8" * 400])
    return rng.choice(
        ["\\gcd(@,3)", "\\lcm(@, 9)", "\\max(@, 2)", "\\lfloor @ \\rfloor", "@ \\bmod 9", "\\log_9 (@)"]
    ).replace("@", big)


def _nested(rng: random.Random) -> str:
    opening, closing = rng.choice(_OPEN_CLOSE)
    depth = rng.randint(9, 300)
    return opening * depth + _number(rng) + closing * depth


def _nested_commands(rng: random.Random) -> str:
    prefix = rng.choice(_PREFIXES)
    depth = rng.randint(5, 120)
    return prefix * depth + "2" + "}" * rng.choice([depth, 0, depth - 1])


def _mixed_nest(rng: random.Random) -> str:
    chosen = [rng.choice(_OPEN_CLOSE) for _ in range(rng.randint(8, 60))]
    return (
        "".join(one[0] + _number(rng, 2) + "+" for one in chosen)
        + "2"
        + "".join(one[1] for one in reversed(chosen))
    )


def _digits(rng: random.Random) -> str:
    return rng.choice(
        ["{}", "0.{}", "2/{}", "{}e999999", "2e{}", "-{}", "\\frac{{{0}}}{{{0}2}}", "2^{{{}}}", "2,{}"]
    ).format(_number(rng, 9) * rng.randint(9, 3000))


def _repeated(rng: random.Random) -> str:
    return rng.choice(_PIECES) * rng.randint(20, 4000)


def _soup(rng: random.Random) -> str:
    return "".join(rng.choice(_PIECES) for _ in range(rng.randint(20, 800)))


def _long_sum(rng: random.Random) -> str:
    term = rng.choice(
        [
            "x",
            "\\sqrt{2}",
            "\\sin x",
            "\\frac{2}{3}",
            "9",
            "\\sqrt[3]{x+2}",
            "x_{2}",
            "\\cos(\\frac{\\pi}{9})",
        ]
    )
    return rng.choice(["+", "\\cdot ", ",", "=", "<", "-"]).join([term] * rng.randint(20, 400))


def _matrix(rng: random.Random) -> str:
    size = rng.randint(3, 30)
    rows = " \\\\ ".join(" & ".join(_number(rng) for _ in range(size)) for _ in range(size))
    return "\\begin{pmatrix} " + rows + " \\end{pmatrix}" + rng.choice(["", "^{9999}", "^{-1}", "!"])


def _roots(rng: random.Random) -> str:
    return "+".join(f"\\sqrt[{rng.randint(2, 99)}]{{{_number(rng)}}}" for _ in range(rng.randint(2, 12)))


_KINDS: list[Callable[[random.Random], str]] = [
    _tower, _plain_tower, _binomial, _factorial, _series, _analysis, _eager, _nested, _nested_commands,
    _mixed_nest, _digits, _repeated,
    _soup,
    _long_sum, _matrix, _roots,
]  # fmt: skip
_FRAMES = [
    "\\boxed{@}", "So the answer is $\\boxed{@}$.", "#### @", "The answer is $@$.", "@", "The answer is @",
    "$$@$$",
    "<think>so</think> \\boxed{@}",
    "\\boxed{\\boxed{@}}", "\\boxed{2 + @}", "\\boxed{x = @}", "#### \\boxed{@}", "**Answer:** $@$", "\\[ @ "
    "\\]", "\\boxed{\\{@, 2\\}}",
]  # fmt: skip
