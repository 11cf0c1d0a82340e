"""The checkers of numbers, the two rule rewards, the choice by data source, and the user's function."""

from __future__ import annotations

import asyncio
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.reward import CustomFunctionConfig, RewardConfig
from agentrl.errors import ConfigError, DataError, PluginError, RewardError
from agentrl.extras.answers.answer_number import stated_number
from agentrl.extras.answers.arithmetic import Arithmetic
from agentrl.extras.answers.gsm8k import Gsm8k, extract_answer, is_correct, parse_number
from agentrl.extras.answers.gsm8k_partner import FEEDBACK
from agentrl.extras.answers.gsm8k_partner import Gsm8k as Gsm8kPartner
from agentrl.plugins import Attempted, load_plugins
from agentrl.rewards.custom import CustomFunction
from agentrl.rewards.select import RewardTable
from agentrl.types import Message, Outcome, Task
from parts.trajectories import make_task


def task(**changes) -> Task:
    return make_task("q", "72", **{"data_source": "gsm8k", **changes})


def attempt(task, messages):
    return Attempted(task, tuple(messages), Outcome.COMPLETED, 1, 1, 1, 1)


def said(*texts: str) -> tuple[Message, ...]:
    return (Message("user", "q"), *(Message("assistant", text) for text in texts))


# ---------------------------------------------------------------------------------------------------- numbers


@given(
    st.integers(-(10**12), 10**12),
    st.sampled_from(["{}", "{:,}"]),
    st.sampled_from(["", "$", "€"]),
    st.sampled_from(["", ".", "%", " apples", ".00"]),
)
def test_every_way_to_write_an_integer_is_read(number, form, currency, tail):
    text = ("-" if number < 0 else "") + currency + form.format(abs(number)) + tail
    assert extract_answer(f"so it is 5.\n#### {text}", strict=True) == number
    assert extract_answer(f"3 of them make {text}", strict=False) == number


@given(st.decimals(-9999, 9999, places=3))
def test_decimals_are_exact(number):
    assert extract_answer(f"#### {number}", strict=True) == Fraction(str(number))


_PIECES = (
    *(
        "####",
        "\n",
        "\n####",
        "18",
        "-3",
        "2 or 3",
        "$1,234.50",
        r"\boxed{7}",
        "the answer is 18",
        "that is wrong",
    ),
    *("wait", "or 20", "<think>", "</think>", "16 - 3 = 13", "**9**", "eggs"),
)


@given(st.integers(-(10**18), 10**18))
def test_a_bare_integer_is_read_like_one_in_a_sentence(number):
    """A bare integer skips the search; a unit behind it does not."""
    assert stated_number(str(number)) == stated_number(f"{number} eggs") == number


@given(st.lists(st.sampled_from(_PIECES), max_size=8).map(" ".join))
def test_an_answer_in_the_requested_form_is_the_answer_in_any_form(text):
    """So one search is enough if it succeeds."""
    if (answer := extract_answer(text, strict=True)) is not None:
        assert extract_answer(text, strict=False) == answer


@given(st.text(max_size=200), st.booleans())
def test_no_text_breaks_the_checker(text, strict):
    assert isinstance(extract_answer(text, strict=strict), Fraction | None)


@pytest.mark.parametrize(
    ("text", "strict", "answer"),
    [
        ("the answer is 72", True, None),
        ("the answer is 72", False, 72),
        ("#### 5\nno, wait\n#### 6", True, 6),
        ("#### six, or 6", True, 6),
        ("#### none\n6", True, None),
        ("5-3", False, None),
        ("5 - 3 = 2", False, 2),
        ("= -2", False, -2),
        ("$-3.50", False, Fraction(-7, 2)),
        (".5 litres", False, Fraction(1, 2)),
        ("1,2,3", False, None),
        ("9" * 5000, False, None),
        ("nothing", False, None),
    ],
)
def test_answers_found_by_hand(text, strict, answer):
    assert extract_answer(text, strict=strict) == answer


@pytest.mark.parametrize(
    ("truth", "number"),
    [("72", 72), (72, 72), (0.1, Fraction(1, 10)), (1e20, 10**20), ("1,000", 1000), ("so\n#### 8", 8)],
)
def test_ground_truths(truth, number):
    assert parse_number(truth) == number
    assert is_correct(Fraction(number), truth)


@pytest.mark.parametrize("truth", [None, "", "none", True, [72], float("nan"), float("inf")])
def test_what_is_no_ground_truth(truth):
    assert parse_number(truth) is None
    assert not is_correct(None, truth)
    for reward in (Gsm8k(), Arithmetic()):
        with pytest.raises(DataError, match=rf"t:0.*ground_truth \(got {re.escape(repr(truth))}\)$"):
            reward.check(task(ground_truth=truth))


# ---------------------------------------------------------------------------------------------------- rewards


@pytest.mark.parametrize("reward", [Gsm8k(), Arithmetic()])
def test_only_the_last_assistant_message_counts(reward):
    assert reward.score(attempt(task(), said("#### 72", "#### 71"))).value == 0.0
    assert reward.score(attempt(task(), said("#### 71", "#### 72"))).value == 1.0
    assert reward.score(attempt(task(), (*said("#### 72"), Message("user", "#### 71")))).value == 1.0


def test_format_is_reported_and_not_rewarded():
    result = Arithmetic().score(attempt(task(), said("#### 1")))
    assert (result.value, result.metrics["accuracy"], result.metrics["format"]) == (0.0, 0.0, 1.0)
    result = Arithmetic().score(attempt(task(), said("72")))
    assert (result.value, result.metrics["accuracy"], result.metrics["format"]) == (0.0, 0.0, 0.0)


def test_gsm8k_takes_the_last_number_only_when_told():
    assert Gsm8k().score(attempt(task(), said("It is 72."))).value == 0.0
    assert Gsm8k({"strict": False}).score(attempt(task(), said("It is 72."))).value == 1.0
    with pytest.raises(ConfigError, match="strict"):
        Gsm8k({"stritc": False})


# -------------------------------------------------------------------------------------------------- the table


def table(**config) -> RewardTable:
    return RewardTable(RewardConfig(**config), load_plugins())


def test_the_data_source_chooses():
    rewards = table(sources={"mine": "gsm8k"})
    assert isinstance(rewards.own(task(data_source="openai/gsm8k")).reward, Gsm8k)
    assert isinstance(rewards.own(task(data_source="mine")).reward, Gsm8k)
    assert isinstance(rewards.own(task(data_source="arithmetic")).reward, Arithmetic)
    rewards.check(task())
    with pytest.raises(
        DataError,
        match=r"no reward for data_source 'x'; known: .*arithmetic.*mine.*\(add it to reward.sources",
    ):
        rewards.check(task(data_source="x"))


def test_unknown_rewards_are_named_at_start():
    with pytest.raises(PluginError, match="unknown reward 'nope'; registered: aime, arithmetic"):
        table(sources={"mine": "nope"})
    with pytest.raises(PluginError, match="unknown reward 'nope'"):
        table(reward_config={"nope": {}})


def custom(tmp_path, body: str, **config) -> RewardTable:
    file = tmp_path / "mine.py"
    file.write_text(body)
    return table(custom_function=CustomFunctionConfig(path=str(file), **config))


def test_a_custom_function_scores_every_source(tmp_path):
    body = """
def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    return {"score": (solution_str == ground_truth) + bonus, "length": len(solution_str), "note": extra_info["note"]}
"""  # noqa: E501
    rewards = custom(tmp_path, body, kwargs={"bonus": 0.5})
    row = task(data_source="anything", ground_truth="a\nb", extra_info={"note": "n"})
    rewards.check(row)
    result = rewards.own(row).reward.score(attempt(row, said("a", "b")))
    assert (result.value, dict(result.metrics), dict(result.details)) == (1.5, {"length": 3.0}, {"note": "n"})


def test_a_custom_function_may_be_async(tmp_path):
    body = "async def f(data_source, solution_str, ground_truth, extra_info):\n    return 0.25\n"
    reward = custom(tmp_path, body, name="f").own(task()).reward
    assert isinstance(reward, CustomFunction)
    assert reward.runs_in == "asyncio"
    assert asyncio.run(reward.score(attempt(task(), said("a")))).value == 0.25
    with pytest.raises(ConfigError, match="async"):
        custom(tmp_path, body, name="f", runs_in="process")


@pytest.mark.parametrize("returned", ["[]", "'good'", "float('nan')", "{'value': 1}"])
def test_what_is_no_score_is_an_error_not_a_zero(tmp_path, returned):
    reward = custom(tmp_path, f"def compute_score(**_):\n    return {returned}\n").own(task()).reward
    with pytest.raises(RewardError, match=re.escape("return a finite number")):
        reward.score(attempt(task(), said("a")))


def test_a_missing_function_is_named(tmp_path):
    with pytest.raises(
        PluginError,
        match=r"reward.custom_function.name: .*has no 'compute_score'; it has: score_answers, Judge$",
    ):
        custom(tmp_path, "from math import sqrt\ndef score_answers(): ...\nclass Judge: ...\n_x = 1\n")
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(PluginError, match="has no 'compute_score'; it defines no function and no class"):
        custom(other, "x = 1\n")
    with pytest.raises(PluginError, match="does not exist"):
        table(custom_function=CustomFunctionConfig(path=str(tmp_path / "none.py")))


# ------------------------------------------------------------------------------------------------ the partner


async def test_the_partner_ends_on_success_and_says_so_otherwise():
    partner = Gsm8kPartner()
    await partner.start(ground_truth="72", query="How many?")
    wrong = await partner.respond(said("#### 71"))
    assert (wrong.text, wrong.is_done, wrong.reward) == (FEEDBACK, False, 0.0)
    right = await partner.respond(said("#### 71", "#### 72"))
    assert (right.is_done, right.reward) == (True, 1.0)
    with pytest.raises(DataError, match="ground_truth"):
        await Gsm8kPartner().start(query="How many?")
