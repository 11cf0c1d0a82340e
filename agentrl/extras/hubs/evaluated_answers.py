"""Answers that a scorer of reasoning-gym evaluates as Python: which texts it may get.

Some of its scorers call `eval` or sympy's `parse_expr` on the model's answer, so `__import__("os")` would run
with the rights of the run. They get only texts in which nothing can be called but functions of mathematics.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping
from typing import Literal

AnswerForm = Literal["plain", "literal", "expression"]

ANSWER_FORMS: Mapping[str, AnswerForm] = {
    # `eval` and `exec` in their modules see only what the generator itself wrote.
    **dict.fromkeys(
        (
            "basic_arithmetic",
            "bf",
            "bitwise_arithmetic",
            "codeio",
            "gsm_symbolic",
            "number_sorting",
            "propositional_logic",
        ),
        "plain",
    ),
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), "literal"),
    **dict.fromkeys(
        (
            "countdown",
            "intermediate_integration",
            "polynomial_multiplication",
            "puzzle24",
            "simple_integration",
        ),
        "expression",
    ),
}
"""Generator -> the form in which its scorer reads an answer, for each one whose module evaluates anything."""

_EVALUATES = re.compile(r"(?<!\bre\.)\b(?:eval|exec|compile|sympify|parse_expr|parse_latex|__import__)\(")
_LITERAL_NODES = (
    ast.Expression,
    ast.Constant,
    ast.List,
    ast.Tuple,
    ast.Name,
    ast.Load,
    ast.UnaryOp,
    ast.USub,
    ast.UAdd,
)
_FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "asec", "acsc"}
    | {"sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "pi", "Abs"}
)
_TOKEN = re.compile(r"\s+|\d+(?:\.\d*)?|\.\d+|(?P<name>[A-Za-z]+)\d*|[-+*/^!(),]")
MAX_EXPRESSION_CHARS = 2_000


def is_evaluating(source: str) -> bool:
    """Return whether the source of a module evaluates text anywhere."""
    return _EVALUATES.search(source) is not None


def is_harmless(answer: str, form: AnswerForm) -> bool:
    """Return whether a scorer that reads this form may evaluate the answer, which must have no white space at
    its ends: what is no Python with it may be Python without.
    """
    assert form == "plain" or answer == answer.strip(), answer
    if form == "literal":
        return _is_literal(answer)
    return form == "plain" or _is_expression(answer)


def _is_literal(text: str) -> bool:
    """Return whether `eval` calls nothing and reads nothing of the scorer's: the text is of lists, numbers,
    texts and names in capitals, or no Python.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text, mode="eval")
    except SyntaxError:
        return True
    except (ValueError, RecursionError, MemoryError):
        return False
    return all(isinstance(node, _LITERAL_NODES) and not _is_variable(node) for node in ast.walk(tree))


def _is_variable(node: ast.AST) -> bool:
    """Return whether the node may be a variable: scorers have the true answer in one, and answers of letters
    are in capitals.
    """
    return isinstance(node, ast.Name) and not node.id.isupper()


def _is_expression(text: str) -> bool:
    """Return whether the text has only numbers, operators, one-letter variables and known functions."""
    if len(text) > MAX_EXPRESSION_CHARS:
        return False
    position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            return False
        name = token["name"]
        if name is not None and len(name) > 1 and name not in _FUNCTIONS:
            return False
        position = token.end()
    return True
