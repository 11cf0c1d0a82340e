"""The files that docs/learning_path.md lets readers write do what it says of them."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.algorithms.compact import ActionBatch
from agentrl.algorithms.policy_losses import PolicyTokens, ppo_clip
from agentrl.algorithms.rules import ClipConfig
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.compose import load_config
from agentrl.controller.credit import advantage_options
from agentrl.data.trajectories import encode, write_parquet
from agentrl.extras.testing.one_row.play import play_row
from agentrl.testing import play
from agentrl.types import Outcome
from parts.built_in import ESTIMATORS

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(
    r"```(python|json|yaml)\n(.*?)```", (ROOT / "docs" / "learning_path.md").read_text(), flags=re.DOTALL
)
PYTHON = {
    re.search(r"learning/(\w+)\.py", text)[1]: text for language, text in BLOCKS if language == "python"
}
(TURNS,) = (text for language, text in BLOCKS if language == "yaml")
ROWS, PARTNER = (text for language, text in BLOCKS if language == "json")


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a reader who has written all files."""
    for name, text in PYTHON.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "turns.yaml").write_text(TURNS)
    (tmp_path / "rows.jsonl").write_text(ROWS)
    write_tiny_tokenizer(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def played(*overrides: str, row: int = 0) -> Any:
    config = load_config(
        str(ROOT / "configs" / "quickstart.yaml"),
        [
            "data.train_files=[rows.jsonl]",
            "model.path=model",
            "agent.tools=[calculator]",
            "agent.max_response_tokens=1024",
            *overrides,
        ],
    )
    return play_row(config, row=row, model="turns.yaml", read=lambda: None, say=lambda text: None).trajectory


@pytest.mark.parametrize("row", [0, 1])
def test_the_rows_are_played_by_the_script(row: int, written: Path) -> None:
    trajectory = played("agent.default=tool_agent", row=row)
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.failure
    assert trajectory.messages[-2].content == "2625"
    assert trajectory.reward == 0.0


def test_the_reward_of_a_near_miss(written: Path) -> None:
    trajectory = played("reward.custom_function.path=near.py")
    assert (trajectory.reward, trajectory.metrics["accuracy"]) == (0.5, 0.0)


def test_the_row_of_the_partner_names_what_it_gets() -> None:
    assert json.loads(PARTNER)["extra_info"]["interaction_kwargs"] == {"name": "customer", "word": "please"}


def test_one_attempt_is_shown_token_by_token(
    written: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = [
        play(["one"], ground_truth="1", reward="gsm8k"),
        play(["#### 1"], ground_truth="1", reward="gsm8k"),
    ]
    members = [attempt.replace(member=member) for member, attempt in enumerate(attempts)]
    write_parquet(written / "step.parquet", encode(members))
    monkeypatch.setattr(sys, "argv", ["look.py", "step.parquet"])
    runpy.run_path("look.py")
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split() for line in lines if re.match(r" *\d+ +\d+ +[01] ", line)]
    assert len(shown) == attempts[0].num_tokens
    assert [int(line[2]) for line in shown] == attempts[0].action_mask.tolist()
    assert {float(line[6]) < 0 for line in shown if line[2] == "1"} == {True}, "it earned less than the other"
    assert {line[6] for line in shown if line[2] == "0"} == {"0.000"}


def test_the_loss_is_ppo_without_its_bounds() -> None:
    proximal, advantages = -torch.rand(50, dtype=torch.float64), torch.randn(50, dtype=torch.float64)
    unclipped = _function("unclipped")
    for distance in (0.0, 0.1):  # at 0, no bound of PPO acts, nor does it on the gradient
        policy = (proximal + distance * torch.randn(50, dtype=torch.float64)).requires_grad_()
        tokens = PolicyTokens(policy, proximal, advantages, torch.zeros(50, dtype=torch.int64))
        losses = unclipped(tokens).losses_A
        expected = -np.exp((policy - proximal).detach().numpy()) * advantages.numpy()
        np.testing.assert_allclose(losses.detach().numpy(), expected)
        (gradient,) = torch.autograd.grad(losses.sum(), policy)
        (bounded,) = torch.autograd.grad(ppo_clip(tokens, clip=ClipConfig(0.01, 0.01)).losses_A.sum(), policy)
        assert torch.equal(gradient, bounded) == (distance == 0.0)


def test_the_estimator_is_dr_grpo() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9, (12,), generator=generator)
    rewards = torch.zeros(int(lengths.sum()), dtype=torch.float64)
    rewards[lengths.cumsum(0) - 1] = torch.randint(0, 2, (12,), generator=generator).double()
    batch = ActionBatch.of_tokens(
        rewards_A=rewards,
        turn_A=torch.zeros_like(rewards, dtype=torch.int64),
        num_tokens_N=lengths,
        group_N=torch.arange(12) % 3,
        is_truncated_N=torch.zeros(12, dtype=torch.bool),
        group_size=4,
    )
    options = advantage_options(AlgorithmConfig())
    found = _function("above_mean")(batch, options).advantages_A
    torch.testing.assert_close(found, ESTIMATORS["dr_grpo"](batch, options).advantages_A)
    assert found.abs().max() > 0


def _function(name: str) -> Any:
    names: dict[str, Any] = {}
    exec(compile(PYTHON[name], f"{name}.py", "exec"), names)
    return names[name]
