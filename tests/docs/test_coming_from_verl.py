"""The code of docs/coming_from_verl.md runs, and does what the page says."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.algorithms.compact import ActionBatch, AdvantageOptions
from agentrl.cluster.workers import LocalWorker
from agentrl.testing import call, play

PAGE = Path(__file__).parents[2] / "docs" / "coming_from_verl.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def defined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that gives what the block that defines a name comes to, imported as a file of the
    reader's.
    """
    monkeypatch.syspath_prepend(str(tmp_path))

    def find(name: str) -> Any:
        [block] = [text for text in BLOCKS if re.search(rf"^(class|def) {name}\b", text, re.MULTILINE)]
        (tmp_path / f"of_the_page_{name.lower()}.py").write_text(block)
        return getattr(importlib.import_module(f"of_the_page_{name.lower()}"), name)

    return find


def test_the_tool(defined):
    trajectory = play([call("city_weather", city="Bern"), "21 degrees."], tools=[defined("city_weather")])
    assert [message.content for message in trajectory.messages if message.role == "tool"] == ["21.0"]


def test_the_agent_and_the_reward(defined):
    trajectory = play(["5", "4"], agent=defined("Twice"), reward=defined("Exact"), ground_truth="4")
    assert [message.role for message in trajectory.messages] == ["user", "assistant", "user", "assistant"]
    assert trajectory.reward == 1.0


def test_the_interaction(defined):
    trajectory = play(["1", "2", "3"], agent="interaction_agent", interaction=defined("Stubborn"))
    assert [message.content for message in trajectory.messages if message.role == "user"][1:] == [
        "Are you sure?"
    ] * 2
    assert trajectory.metrics["reward/interaction"] == 1.0


def test_the_estimator(defined):
    batch = ActionBatch.of_tokens(
        rewards_A=torch.tensor([0.0, 2.0, -3.0], dtype=torch.float64),
        turn_A=torch.zeros(3, dtype=torch.int64),
        num_tokens_N=torch.tensor([2, 1]),
        group_N=torch.tensor([0, 0]),
        is_truncated_N=torch.zeros(2, dtype=torch.bool),
        group_size=2,
    )
    options = AdvantageOptions(
        gamma=1.0,
        lam=1.0,
        bootstrap_truncated=False,
        singleton="zero",
        passk_k=1,
        solved_reward=1.0,
        step_weight=1.0,
    )
    assert defined("sign")(batch, options).advantages_A.tolist() == [1.0, 1.0, -1.0]


def test_the_worker(defined):
    judge = defined("Judge")
    assert LocalWorker(judge()).run(judge.score, ["a", "bcd"]) == [1.0, 3.0]
