"""Scorers of reasoning-gym evaluate some answers as Python: none of them calls anything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.extras.hubs.evaluated_answers import is_evaluating, is_harmless

ATTACKS = (
    "__import__('os').system('true')",
    "().__class__",
    "open('/etc/passwd')",
    "eval('1')",
    "exec('1')",
    "sin('1')",
    "[x for x in (1,)]",
    "(lambda: 1)()",
    "f'{open(0)}'",
    "print(1)",
    "a.b",
    "x[0]",
    "\n print(1)",
    "  \t exit()",
    "1 if exit() else 2",
)
SURROUNDINGS = st.text("()[]+-*/ \n1x,", max_size=6)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("form", ["literal", "expression"])
def test_an_answer_that_would_run_is_not_given_to_the_scorer(attack: str, form) -> None:
    assert not is_harmless(attack.strip(), form)


@pytest.mark.parametrize("name", ["oracle_answer", "entry", "[answer]", "ｏracle_answer"])
def test_no_variable_of_a_scorer_can_be_the_answer(name: str) -> None:
    """`eval("oracle_answer")` would be the true answer."""
    assert not is_harmless(name, "literal")


@given(st.sampled_from(ATTACKS[:6]), SURROUNDINGS, SURROUNDINGS)
def test_nor_is_it_in_any_surroundings_that_python_reads(attack: str, before: str, after: str) -> None:
    text = before + attack + after
    try:
        compile(text.strip(), "answer", "eval")
    except SyntaxError:
        return
    assert not is_harmless(text.strip(), "literal")
    assert not is_harmless(text.strip(), "expression")


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        ("[[0, 1], [1, 0]]", "literal"),
        ("['a', 'b']", "literal"),
        ("1 2 3", "literal"),
        ("_ Q _\nQ _ _", "literal"),
        ("ABCDE", "literal"),
        ("0.5*x**2 + sin(3*x) + C", "expression"),
        ("(8 - 2)*(3 + 1)", "expression"),
        ("X1^2/3.5 - .5", "expression"),
        ("__import__('os')", "plain"),
    ],
)
def test_right_answers_reach_the_scorer(answer: str, form) -> None:
    assert is_harmless(answer, form)


def test_calls_that_evaluate_are_found() -> None:
    assert is_evaluating("    value = eval(answer)")
    assert is_evaluating("float(parse_expr(answer))")
    assert not is_evaluating("self.evaluate(answer); retrieval(answer)")
    assert is_evaluating("code = compile(answer)")
    assert not is_evaluating("pattern = re.compile(answer)")
