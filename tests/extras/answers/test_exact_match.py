"""Exact match: SQuAD's normalisation against its own definition, the answer's place, forms of the truth."""

import re
import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import DataError
from agentrl.extras.answers.exact_match import (
    ExactMatch,
    is_exact_match,
    normalize,
    tagged_answer,
    true_answers,
)
from agentrl.types import Message, ToolCall
from parts.trajectories import attempted, make_task


def squad(text: str) -> str:
    """The four steps of SQuAD's evaluation script, in its order."""
    text = "".join(character for character in text.lower() if character not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text, flags=re.UNICODE).split())


@given(st.lists(st.sampled_from(["The", "a", "an", "Theory", "U.S.", "é", "'s", "-", "3.5", " ", "\n", "X"])))
def test_the_normalisation_is_squad_s(words):
    text = " ".join(words)
    assert normalize(text) == squad(text)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>Bern</answer>", "Bern"),
        ("<answer> a </answer> no: <answer>\nBern\n</answer> done", "Bern"),
        ("<think><answer>Rome</answer></think><answer>Bern</answer>", "Bern"),
        ("<think><answer>Rome</answer></think>Bern", None),
        ("<answer>Bern", None),
        ("</answer>Bern<answer>", None),
        ("Bern", None),
        ("", None),
    ],
)
def test_the_answer_is_in_the_last_closed_tags_outside_of_thoughts(text, answer):
    assert tagged_answer(text) == answer


@pytest.mark.parametrize(
    ("truth", "answers"),
    [
        ("Bern", ("Bern",)),
        (["Bern", "Berne"], ("Bern", "Berne")),
        ('["Bern", "Berne"]', ("Bern", "Berne")),
        ("[sic]", ("[sic]",)),
        ({"target": ["Bern"]}, ("Bern",)),
        ({"target": np.array(["Bern", "Berne"], object)}, ("Bern", "Berne")),
        (["Bern", "the"], ("Bern",)),
    ],
)
def test_forms_of_the_ground_truth(truth, answers):
    assert true_answers(truth) == answers
    ExactMatch().check(make_task(truth=truth))


@pytest.mark.parametrize("truth", [None, 3, [], [3], {"target": None}, "", "...", {}])
def test_other_ground_truths_are_refused(truth):
    with pytest.raises(DataError, match="needs a text, or a list of texts"):
        ExactMatch().check(make_task(truth=truth))


@pytest.mark.parametrize("answer", ["", "the", "!!!", " "])
def test_an_answer_of_which_nothing_is_left_is_wrong(answer):
    assert not is_exact_match(answer, ("the", "!"))


@pytest.mark.parametrize(
    ("options", "answer", "value", "metrics"),
    [
        ({}, "<answer>bern</answer>", 1.0, {"accuracy": 1.0, "format": 1.0}),
        ({}, "Bern", 0.0, {"accuracy": 0.0, "format": 0.0}),
        ({"needs_tags": False}, "Bern.", 1.0, {"accuracy": 1.0, "format": 0.0}),
        ({"format_score": 0.1}, "<answer>Rome</answer>", 0.1, {"accuracy": 0.0, "format": 1.0}),
        ({"format_score": 0.1}, "Rome", 0.0, {"accuracy": 0.0, "format": 0.0}),
    ],
)
def test_options(options, answer, value, metrics):
    result = ExactMatch(options).score(attempted(make_task(truth=["Bern"]), answer))
    assert (result.value, dict(result.metrics)) == (value, metrics)


def test_an_answer_that_was_handed_in_needs_no_tags():
    call = ToolCall("1", "finish", {"answer": "Bern"})
    assert (
        ExactMatch().score(attempted(make_task(truth="Bern"), Message("assistant", "", (call,)))).value == 1.0
    )


@pytest.mark.parametrize(
    "text", ["<answer>" * 60_000, "</answer>" * 60_000, "<answer>" + "a " * 300_000 + "</answer>"]
)
def test_hostile_answers_are_wrong(text):
    assert ExactMatch().score(attempted(make_task(truth="Bern"), text)).value == 0.0
