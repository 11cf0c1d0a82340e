r"""The built-in rewards: answers found by hand, laws where there are any, services over real HTTP."""

from __future__ import annotations

import dataclasses
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.reward import RewardConfig
from agentrl.errors import ConfigError, DataError, RewardError
from agentrl.extras.answers.aime import Aime, extract_integer, parse_integer
from agentrl.extras.answers.boxed import BoxOptions, answer_box, last_boxed
from agentrl.extras.answers.format import Format
from agentrl.extras.answers.gsm8k import Gsm8k
from agentrl.extras.answers.length_penalty import LengthPenalty, soft_overlong_punishment
from agentrl.extras.answers.math import Math
from agentrl.plugins import Attempted, load_plugins
from agentrl.rewards.select import RewardTable, reward_of
from agentrl.types import Message, Outcome, Task, ToolCall
from parts.trajectories import attempted, make_task


def task(**changes) -> Task:
    return make_task("How many?", "72", **changes)


def attempt(
    *texts: str, truth="72", reasoning: str = "", tokens: int = 1, limit: int = 100, **changes
) -> Attempted:
    answers = [Message("assistant", text, reasoning=reasoning) for text in texts]
    done = attempted(task(ground_truth=truth, **changes), *answers, tokens=tokens, limit=limit)
    return dataclasses.replace(done, num_action_tokens=tokens - 1)


# ------------------------------------------------------------------------------------------------------ boxes

BALANCED = st.recursive(
    st.text("ab1 ", max_size=3),
    lambda inner: st.lists(inner.map(lambda t: "{" + t + "}") | inner, max_size=3).map("".join),
)


@given(st.text("ab{}\\", max_size=30), BALANCED)
def test_the_last_box_is_found_with_its_braces(before, inside):
    assert last_boxed(before.replace("\\", "") + "\\boxed{" + inside + "} so.") == inside


def box_by_hand(text: str) -> str | None:
    """Begin at each box, the last one first, and walk to the brace that closes it."""
    starts, at = [], 0
    while at < len(text):
        box = re.compile(r"\\(boxed|fbox)\s{0,10}\{").match(text, at)
        at = box.end() if box else at + 1 + (text[at] == "\\")
        starts += [at] if box else []
    for start in reversed(starts):
        depth, at = 1, start
        while at < len(text):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if not depth:
                return text[start:at]
            at += 1 + (text[at] == "\\")
    return None


PIECES = [r"\boxed{", r"\boxed{", r"\fbox {", "boxed{", "{", "}", "}", "}", r"\{", r"\}", "\\", "1", "a "]


@settings(max_examples=500)
@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_no_text_breaks_the_box(text):
    assert last_boxed(text) == box_by_hand(text)


def test_most_texts_that_try_to_break_the_box_hold_one():
    texts = ["".join(random.Random(seed).choices(PIECES, k=seed % 15)) for seed in range(300)]
    assert sum(box_by_hand(text) is not None for text in texts) > 100


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{1} or \boxed{2}", "2"),
        (r"\boxed{1} or \boxed{2", "1"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{3}", "3"),
        (r"\boxed {4}", "4"),
        ("boxed{5}", None),
        ("", None),
    ],
)
def test_boxes_by_hand(text, inside):
    assert last_boxed(text) == inside


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("none", None),
        ("", None),
        (r"\boxed{5}", "5"),
        (r"\boxed{ 5 } so", "5"),
        (r"\boxed{5", ""),
        (r"\boxed{5} then \boxed{6", ""),
        (r"\boxed{}", ""),
        # boxes in a row are one answer, others are not
        (r"\boxed{5} or \boxed{6}", "5, 6"),
        (r"\boxed{5}, \boxed{6} and \boxed{7}", "5, 6, 7"),
        (r"\boxed{5} and so \boxed{6}", "6"),
        (r"\boxed{4} and so \boxed{5} or \boxed{6}", "5, 6"),
        (r"\boxed{4}, \boxed{5} and so \boxed{6}", "6"),
        (r"\boxed{5}$ or $\boxed{5}", "5"),
        (" or ".join(rf"\boxed{{{n}}}" for n in range(8)), "0, 1, 2, 3, 4, 5, 6, 7"),
        (" or ".join(rf"\boxed{{{n}}}" for n in range(9)), "1, 2, 3, 4, 5, 6, 7, 8"),
        # a box in a box
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{ \fbox{ \boxed{\frac{1}{2}} } }", r"\frac{1}{2}"),
        (r"\boxed{\boxed{\boxed{\boxed{5}}}}", "5"),
        (r"\boxed{\boxed{\boxed{\boxed{\boxed{5}}}}}", r"\boxed{5}"),
        (r"\boxed{\boxed{5} + 1}", r"\boxed{5} + 1"),
        (r"\boxed{x + \boxed{5}}", r"x + \boxed{5}"),
        (r"\boxed{\boxed{5} + \boxed{6}}", r"\boxed{5} + \boxed{6}"),
        (r"\boxed{4} and so \boxed{\boxed{5} + 1}", r"\boxed{5} + 1"),
        # what is denied or hidden does not count
        (r"It is not \boxed{5}", ""),
        (r"It is \boxed{5}, not \boxed{6}", "5"),
        (r"It is \boxed{5}, and not \boxed{6}, nor \boxed{7}", "5"),
        (r"It is not \boxed{5} but it is \boxed{6}", "6"),
        ("not" + " " * 100 + r"\boxed{5}", "5"),
        ("I do not know much about this question, but I would say that it is " + r"\boxed{5}", "5"),
        (r"\boxed{5} <!-- \boxed{6} -->", "5"),
        (r"\boxed{5} \phantom{\boxed{6}}", "5"),
    ],
)
def test_the_answer_of_the_last_boxes(text, inside):
    assert answer_box(text) == inside


@pytest.mark.parametrize(
    ("options", "scores"),
    [
        ({}, (0.0, 0.0)),
        ({"wrong_score": -1.0}, (-1.0, -1.0)),
        ({"format_score": 0.5}, (0.5, 0.0)),
        ({"format_score": 0.0, "wrong_score": -1.0}, (0.0, -1.0)),
    ],
)
def test_scores_of_wrong_answers_with_and_without_a_box(options, scores):
    chosen = BoxOptions(**options)
    assert (chosen.score_wrong(has_box=True), chosen.score_wrong(has_box=False)) == scores
    assert chosen.strict is False


def test_a_box_is_found_in_linear_time():
    """A quadratic search would take hours."""
    assert last_boxed("\\boxed{" * 300_000) is None


# ------------------------------------------------------------------------------------------------------- aime


@given(st.integers(0, 999), st.sampled_from(["{}", "{:03d}", "${}$", r"\text{{{}}}", "{}.", r" {}\,"]))
def test_every_way_to_write_an_aime_answer(number, form):
    assert (
        extract_integer("first \\boxed{7}, then \\boxed{" + form.format(number) + "}", strict=True) == number
    )
    assert extract_integer(f"3 of 4 steps. Answer: {number:03d}", strict=False) == number


@pytest.mark.parametrize(
    ("text", "strict", "answer"),
    [
        ("the answer is 72", True, None),
        ("the answer is 72, out of 80", False, 72),
        ("it is 5, no, 6", False, 6),
        (r"\boxed{1000}", True, None),
        (r"\boxed{-5}", True, None),
        (r"\boxed{1/2} = 3", False, None),
        ("it is 2024", False, None),
        ("it is 3.5", False, None),
        (r"\boxed{0}", True, 0),
        ("nothing", False, None),
    ],
)
def test_aime_by_hand(text, strict, answer):
    assert extract_integer(text, strict=strict) == answer


@pytest.mark.parametrize(
    ("truth", "number"),
    [("033", 33), (33, 33), (33.0, 33), ("1000", None), (-1, None), (True, None), (None, None)],
)
def test_aime_ground_truths(truth, number):
    assert parse_integer(truth) == number


def test_aime_scores():
    assert Aime().score(attempt(r"\boxed{072}")).value == 1.0
    assert Aime({"strict": True}).score(attempt("It is 72.")).value == 0.0
    graded = Aime({"format_score": 0.1, "wrong_score": -1.0})
    assert [graded.score(attempt(text)).value for text in (r"\boxed{72}", r"\boxed{71}", "71")] == [
        1.0,
        0.1,
        -1.0,
    ]
    with pytest.raises(DataError, match="integer from 0 to 999"):
        Aime().check(task(ground_truth="7/2"))


def test_gsm8k_grades_form_apart_from_correctness():
    graded = Gsm8k({"format_score": 0.1})
    assert [graded.score(attempt(text)).value for text in ("#### 72", "#### 71", "71")] == [1.0, 0.1, 0.0]
    lenient = Gsm8k({"format_score": 0.1, "strict": False})
    assert [lenient.score(attempt(text)).value for text in ("72", "71", "none")] == [1.0, 0.1, 0.0]


# ------------------------------------------------------------------------------------------------------- math


@pytest.mark.parametrize(
    ("answer", "truth", "value"),
    [
        (r"So \boxed{\frac{1}{2}}.", "0.5", 1.0),
        (r"So \boxed{0.5}.", r"\frac12", 1.0),
        (r"The final answer is $x^2 + 2x + 1$.", "(x+1)^2", 1.0),
        (r"\boxed{(-\infty, 3)}", r"(-\infty,3)", 1.0),
        (r"\boxed{3, 1}", r"\{1, 3\}", 1.0),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", 1.0),
        (r"\boxed{72}", "so \\boxed{72}.", 1.0),
        (r"\boxed{72}", 72, 1.0),
        (r"\boxed{71}", "72", 0.0),
        (r"72, or rather \boxed{71}", "72", 0.0),
        (r"\boxed{\frac{1}{", "72", 0.0),
        ("", "72", 0.0),
    ],
)
def test_expressions_are_compared_by_value(answer, truth, value):
    assert Math().score(attempt(answer, truth=truth)).value == value


def test_math_grades_form_apart_from_correctness():
    graded = Math({"strict": True, "format_score": 0.1, "wrong_score": -1.0})
    results = [graded.score(attempt(text)) for text in (r"\boxed{72}", r"\boxed{71}", "The answer is 72.")]
    assert [r.value for r in results] == [1.0, 0.1, -1.0]
    assert [r.metrics["format"] for r in results] == [1.0, 1.0, 0.0]
    assert results[1].details == {"answer": "71"}


@pytest.mark.parametrize("truth", [None, "", True, ["72"]])
def test_math_needs_a_ground_truth(truth):
    with pytest.raises(DataError, match="expression"):
        Math().check(task(ground_truth=truth))


# ----------------------------------------------------------------------------------------------------- length


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 10_000), st.integers(0, 10_000))
def test_the_punishment_follows_the_paper(first, second, one, other):
    """Eq. 13 as it stands there, piece by piece; and it never rises with length."""
    limit, cache = max(first, second), min(first, second)

    def by_pieces(length: int) -> float:
        if length <= limit - cache:
            return 0.0
        return ((limit - cache) - length) / cache if length <= limit else -1.0

    short, long = sorted((one, other))
    values = [soft_overlong_punishment(length, max_length=limit, buffer=cache) for length in (short, long)]
    assert values == pytest.approx([by_pieces(short), by_pieces(long)])
    assert values[0] >= values[1]


def test_the_length_that_counts():
    assert LengthPenalty({"buffer_tokens": 40}).score(attempt("x", tokens=80)).value == -0.5
    assert (
        LengthPenalty({"buffer_tokens": 40, "count": "action"}).score(attempt("x", tokens=81)).value == -0.5
    )
    assert LengthPenalty({"buffer_tokens": 40, "max_tokens": 60}).score(attempt("x", tokens=80)).value == -1.0
    assert LengthPenalty().score(attempt("x", tokens=90)).value == -0.5, (
        "a fifth of the limit, as in the paper"
    )
    assert LengthPenalty().score(attempt("x", tokens=80)).metrics == {"overlong": 0.0}
    with pytest.raises(RewardError, match="buffer_tokens=101 exceeds the limit of 100"):
        LengthPenalty({"buffer_tokens": 101}).score(attempt("x"))


# ----------------------------------------------------------------------------------------------------- format


@pytest.mark.parametrize(
    ("form", "text", "value"),
    [
        ("think", "<think>so</think> 72", 1.0),
        ("think", "<think>so</think>", 0.0),
        ("think", "so</think> 72", 0.0),
        ("think", "<think>a</think><think>b</think> 72", 0.0),
        ("think_answer", "<think>so</think>\n<answer>72</answer>", 1.0),
        ("think_answer", "<think>so</think> well <answer>72</answer>", 0.0),
        ("think_answer", "<answer>72</answer><think>so</think>", 0.0),
        ("think_answer", "<think>so</think><answer></answer>", 0.0),
        ("boxed", r"\boxed{1}", 1.0),
        ("answer_line", "#### 1", 1.0),
        ("answer_line", "1", 0.0),
    ],
)
def test_forms_by_hand(form, text, value):
    assert Format({"form": form}).score(attempt(text)).value == value


def test_a_thought_that_the_template_keeps_apart_counts_as_text():
    assert Format({"form": "think"}).score(attempt("72", reasoning="so")).value == 1.0
    assert attempt("72", reasoning="so").response_text == "<think>\nso\n</think>\n72"


def test_patterns_are_matched_as_a_whole_in_a_process():
    reward = Format({"pattern": r"Answer: \d+"})
    assert reward.runs_in == "process"
    assert [reward.score(attempt(text)).value for text in ("Answer: 72", "so Answer: 72")] == [1.0, 0.0]
    every = Format({"pattern": r"Answer: \d+", "of": "every_turn"})
    assert [
        every.score(attempt(*texts)).value for texts in (("Answer: 1", "Answer: 2"), ("1", "Answer: 2"), ())
    ] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "config", [{}, {"form": "think", "pattern": "x"}, {"form": "nope"}, {"pattern": "("}, {"other": 1}]
)
def test_format_refuses_what_is_no_form(config):
    with pytest.raises(ConfigError, match="reward 'format'"):
        Format(config)


# ---------------------------------------------------------------------------------------------------- choices


@pytest.mark.parametrize(
    ("source", "reward"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("HuggingFaceH4/MATH-500", "math"),
        ("math_dapo", "math"),
        ("numina_olympiads", "math"),
        ("aime_2025", "aime"),
        ("AIME 2024", "aime"),
        ("Maxwell-Jia/AIME_2024", "aime"),
        ("HuggingFaceH4/aime_2024", "aime"),
        ("geometry3k", None),
    ],
)
def test_the_presets_know_the_common_data_sources(source, reward):
    assert reward_of(source, RewardConfig().sources) == reward


def test_exact_names_go_before_patterns_and_long_patterns_before_short():
    sources = {"*": "a", "math*": "b", "math_hard*": "c", "math_hard_1": "d"}
    assert [reward_of(name, sources) for name in ("x", "math_1", "math_hard_2", "math_hard_1")] == [
        "a",
        "b",
        "c",
        "d",
    ]


def test_every_term_checks_every_row_before_any_rollout():
    plugins = load_plugins()
    table = RewardTable(RewardConfig(terms={"aime": {}}), plugins)
    table.check(task(data_source="gsm8k"))
    with pytest.raises(DataError, match="reward 'aime' needs an integer"):
        table.check(task(data_source="gsm8k", ground_truth="7,200"))
    with pytest.raises(ConfigError, match=r"reward.terms.gsm8k: .* already has this reward"):
        RewardTable(RewardConfig(terms={"gsm8k": {}}), plugins).check(task(data_source="gsm8k"))
    for name in ("tool", "a/b"):
        with pytest.raises(ConfigError, match="a term's name"):
            RewardTable(RewardConfig(terms={name: {"reward": "gsm8k"}}), plugins)


def test_a_terms_config_goes_over_that_of_the_reward():
    config = RewardConfig(
        reward_config={"gsm8k": {"strict": False, "format_score": 0.5}},
        terms={"form": {"reward": "gsm8k", "config": {"format_score": 0.25}}},
    )
    own, term = RewardTable(config, load_plugins()).terms(task(data_source="gsm8k"))
    assert (own.name, own.reward.score(attempt("71")).value) == ("gsm8k", 0.5)
    assert (term.name, term.reward.score(attempt("71")).value) == ("form", 0.25)


def test_the_turns_of_a_custom_function_are_verls(tmp_path):
    """verl counts the prompt, each assistant turn, and what stands between them: here 1 + 2 + 1."""
    file = tmp_path / "turns.py"
    file.write_text("def compute_score(extra_info, **_):\n    return extra_info['num_turns']\n")
    row = task()
    call = (ToolCall("1", "f", {}), ToolCall("2", "f", {}))
    messages = (
        *row.messages,
        Message("assistant", "", call),
        Message("tool", "1"),
        Message("tool", "2"),
        Message("assistant", "72"),
    )
    table = RewardTable(RewardConfig(custom_function={"path": str(file)}), load_plugins())
    assert table.own(row).reward.score(Attempted(row, messages, Outcome.COMPLETED, 2, 9, 9, 9)).value == 4.0
