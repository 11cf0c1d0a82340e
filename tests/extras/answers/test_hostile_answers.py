"""No answer buys itself a failure: what fails because of what the model wrote is a wrong answer, within a
second of CPU.
"""

from __future__ import annotations

from collections import Counter

import pytest

from agentrl.errors import RewardError
from agentrl.extras.answers.aime import Aime
from agentrl.extras.answers.arithmetic import Arithmetic
from agentrl.extras.answers.format import Format
from agentrl.extras.answers.gsm8k import Gsm8k
from agentrl.extras.answers.math import Math
from agentrl.plugins import Attempted, Reward, RewardResult
from agentrl.rewards.calls import RewardCalls, Term
from agentrl.rewards.recipes import Recipe
from agentrl.rollout.asyncio_host import AsyncioHost
from parts.cpu_time import cpu_s
from parts.hostile_answers import TRUTH, hostile_answers
from parts.trajectories import attempted, make_task

MAX_CPU_S = 1.0
CHECKERS = [
    Gsm8k(),
    Gsm8k({"strict": False}),
    Arithmetic(),
    Aime(),
    Math(),
    Math({"strict": True}),
    Format({"pattern": r"(?:a+)+7717"}),
]
FROM_OUTSIDE = [
    r"\boxed{\binom{20000}{10000}}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{\prod_{n=1}^{10^9} n}",
    r"\boxed{\prod_{n=1000000000}^{1} n}",
    *(rf"\boxed{{{'(' * n}2{')' * n}}}" for n in (20, 90, 300)),
]  # fmt: skip


def attempt(text: str, truth: object = TRUTH) -> Attempted:
    return attempted(make_task("q", truth), text)


def judge(reward: Reward, texts: list[str]) -> Counter[str]:
    """Return what was wrong with the verdicts, and how often."""
    reward.score(attempt("\\boxed{2}"))  # the first call imports and compiles
    found: Counter[str] = Counter()
    for text in texts:
        results: list[RewardResult] = []
        seconds = cpu_s(
            lambda text=text, results=results: results.append(reward.score(attempt(text))), below=MAX_CPU_S
        )
        result = results[0]
        assert isinstance(result, RewardResult)
        if result.value or result.metrics.get("accuracy_flexible"):
            found[f"paid: {text[:100]!r}"] += 1
        if seconds > MAX_CPU_S:
            found[f"{seconds:.2f} s: {text[:100]!r}"] += 1
    return found


@pytest.mark.parametrize("reward", CHECKERS, ids=lambda reward: f"{reward.name}-{reward.config or ''}")
def test_a_sample_of_hostile_answers_earns_nothing_and_breaks_nothing(reward):
    assert not judge(reward, [*FROM_OUTSIDE, *hostile_answers(seed=1, num=48)])


@pytest.mark.slow
@pytest.mark.parametrize("reward", CHECKERS, ids=lambda reward: f"{reward.name}-{reward.config or ''}")
def test_hostile_answers_earn_nothing_and_break_nothing(reward):
    assert not judge(reward, list(hostile_answers(seed=2, num=500)))


# -------------------------------------------------------------------------------------------- the last resort

ENDLESS = """
from agentrl.errors import RewardError
from agentrl.plugins import Reward, RewardResult

class Endless(Reward):
    name = "endless"
    runs_in = "process"
    max_answer_cpu_s = 1

    def rehearse(self, task):
        if task.ground_truth == "broken":
            raise RewardError("the ground truth is broken")
        if task.ground_truth == "dies":
            import os
            os.abort()

    def score(self, attempt):
        if attempt.answer == "endless":
            pow(3, 10**10)  # one operation in C, which no exception ends
        if attempt.answer == "crash":
            import ctypes
            ctypes.string_at(0)
        if attempt.answer == "killed":
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt.answer == "raises":
            raise ValueError("raises")
        return RewardResult(1.0)

    def failed(self, attempt):
        return RewardResult(0.0)
"""


CALLS = [
    ("endless", "right", 0.0), ("fine", "right", 1.0), ("crash", "right", 0.0), ("killed", "right", "Killed"),
    ("raises", "right",
    "raises"),
    ("fine", "broken", "the ground truth is broken"), ("fine", "dies", "Aborted"), ("fine", "right", 1.0),
]  # fmt: skip
"""An answer, a ground truth, and the value or what the error says."""


async def test_a_process_that_an_answer_ends_is_a_wrong_answer_and_one_that_ends_without_it_is_not(tmp_path):
    path = tmp_path / "endless.py"
    path.write_text(ENDLESS)
    recipe = Recipe(str(path), "Endless", ({},))
    term = Term("endless", recipe.make(), 1.0, 60.0, recipe)

    with AsyncioHost() as host:
        calls = RewardCalls(host, num_processes=1)
        for text, truth, expected in CALLS:
            if isinstance(expected, str):
                with pytest.raises(RewardError, match=expected):
                    await calls.call(term, attempt(text, truth))
            else:
                result = await calls.call(term, attempt(text, truth))
                assert isinstance(result, RewardResult)
                assert result.value == expected, text
        await calls.aclose()


def test_math_asks_again_when_its_ground_truth_is_no_expression():
    """What fails without regard to the answer is a failure, whatever the answer is."""
    for text in ("\\boxed{2}", FROM_OUTSIDE[0]):
        with pytest.raises(RewardError, match="not a mathematical expression"):
            Math().score(attempt(text, ""))
