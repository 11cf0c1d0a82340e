"""The checking tool known from verl's GSM8K example."""

from __future__ import annotations

import pytest

from agentrl.types import Outcome
from parts.scripted import call, play

NAME = "calc_gsm8k_reward"


def check(*answers: str, truth="42", weight=1.0, **config):
    return play(
        [*(call(NAME, answer=answer) for answer in answers), "done"],
        tools=[NAME],
        tools_kwargs={NAME: {"create_kwargs": {"ground_truth": truth}}},
        tool_config={NAME: config},
        reward_config={"tool_reward_weight": weight},
    )


def given(trajectory) -> list[float]:
    return [event.value for event in trajectory.rewards if event.name == f"tool/{NAME}"]


@pytest.mark.parametrize(
    ("answers", "rewards"),
    [
        (["42"], [0.0, 1.0]),
        (["#### 42"], [0.0, 1.0]),
        (["1", "42"], [-0.05, 0.0, 1.0]),
        (["42", "42"], [0.0, -0.05, 1.0]),
        (["42", "1"], [0.0, -0.05, 0.0]),
        (["1", "2", "3"], [-0.05, -0.05, -0.05, 0.0]),
    ],
)
def test_an_answer_that_does_not_improve_costs_a_little_and_the_last_one_counts(answers, rewards) -> None:
    assert given(check(*answers)) == rewards


def test_the_penalty_is_configured() -> None:
    assert given(check("1", penalty=-1.0)) == [-1.0, 0.0]


def test_the_model_reads_the_verdict() -> None:
    messages = check("41", "$42").messages
    assert [message.content for message in messages if message.role == "tool"] == [
        "answer: 41, reward: 0.0",
        "answer: $42, reward: 1.0",
    ]


def test_a_row_without_a_ground_truth_is_the_datas_fault() -> None:
    trajectory = check("42", truth=None)
    assert trajectory.outcome is Outcome.ABORTED
    assert "create_kwargs.ground_truth" in str(trajectory.failure)
