"""Environments of verifiers, with a small package of the same entry points: rows, rewards, and what is no
answer of the policy is never scored as one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.config.agent import AgentConfig
from agentrl.config.reward import RewardConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.errors import ConfigError, DataError, UserError
from agentrl.plugins import load_plugins
from agentrl.rollout.conversation_line import PromptLimits
from agentrl.testing import ScriptedModel, Stage, play, tiny_chat
from agentrl.types import Message, Outcome, Task
from parts.verifiers_world import CONFIG, SMALL, TASK


def attempt(turns, *, row: dict | None = None, config: dict | None = None, **settings):
    return play(
        turns,
        agent="verifiers",
        environment="verifiers",
        environment_kwargs={"environment": "sums", "task": json.dumps(TASK), **(row or {})},
        environment_config={"verifiers": {**CONFIG, **(config or {})}},
        reward="verifiers",
        **{"max_turns": 4, "trajectory_timeout_s": 120.0, **settings},
    )


def rewards(played) -> list[float]:
    assert played.failure is None, played.failure
    return [event.value for event in played.rewards]


def test_verifiers_plays_and_scores_and_the_gateway_records() -> None:
    played = attempt(["hm", "4"])
    assert (played.outcome, rewards(played)) == (Outcome.COMPLETED, [1.0])
    assert [message.content for message in played.messages] == ["3 + 1?", "hm", "go on", "4"]
    assert played.segment_starts == (0,)
    assert played.metrics["reward/verifiers/length"] == 1.0
    facts = {"environment": "sums", "reward": 1.0, "metrics": {"length": 1.0}, "stop": "done"}
    assert played.extra_info["environment_facts"] == facts


def test_a_wrong_answer_is_one() -> None:
    assert rewards(attempt(["5"])) == [0.0]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("raises", "raised RuntimeError: no database"),
        ("dies", "ended with status 7"),
        ("nan", "gave the reward nan"),
    ],
)
def test_an_environment_that_fails_is_never_a_wrong_answer(fault, says) -> None:
    played = attempt(["4"], row={"arguments": json.dumps({"fault": fault})})
    assert (played.outcome, played.rewards) == (Outcome.ENVIRONMENT_ERROR, ())
    assert says in str(played.failure)
    if fault == "raises":
        assert "small_verifiers/verifiers/__init__.py:" in played.failure.place


def test_an_attempt_that_a_budget_ends_is_cut_off() -> None:
    cut_off = {"reward_config": {"verifiers": {"cut_off": -1.0}}}
    played = attempt(["hm"] * 9, max_turns=2, reward_config=cut_off)
    assert played.outcome is Outcome.TURN_LIMIT
    assert rewards(played) == [-1.0]
    assert played.metrics["reward/verifiers/is_cut_off"] == 1.0


def test_a_server_that_does_not_answer_is_a_failure_of_the_model() -> None:
    played = attempt([])
    assert (played.outcome, played.rewards) == (Outcome.MODEL_ERROR, ())


def test_the_deadline_of_the_attempt_cancels_its_rollout() -> None:
    played = attempt(lambda turn, prompt: "hm", latency_s=float("inf"), trajectory_timeout_s=2.0)
    assert played.outcome is Outcome.TIMEOUT


def group(said: list[str], *, max_turns: int = 4) -> list:
    """Play a group in an environment that scores it together; each attempt says one of `said`."""
    plugins = load_plugins()
    task = Task(
        task_id="t",
        data_source="verifiers/sums",
        messages=(Message("user", "3 + 1?"),),
        agent_name=plugins.agents.resolve("verifiers"),
        environment_kwargs={
            "name": "verifiers",
            "environment": "sums",
            "arguments": '{"fault": "group"}',
            "task": json.dumps(TASK),
        },
    )
    waiting = iter(said)
    stage = Stage(
        ScriptedModel(tiny_chat(), lambda turn, prompt: next(waiting)),
        plugins=plugins,
        agent=AgentConfig(environment_config={"verifiers": CONFIG}, max_turns=max_turns),
        rollout=RolloutConfig(group_size=len(said)),
        reward=RewardConfig(sources={"verifiers/sums": "verifiers_group"}),
        prompt=PromptLimits(200, "error"),
    )
    return stage.play(task, n=len(said))


def test_a_group_is_scored_together() -> None:
    played = group(["5", "4", "4, I think", "4."])
    said = {member.messages[-1].content: rewards(member) for member in played}
    assert said == {"5": [0.0], "4": [1.0], "4, I think": [0.0], "4.": [0.0]}
    assert {member.metrics["reward/verifiers_group/compared"] for member in played} == {4.0}


def test_attempts_that_a_budget_ends_are_not_compared() -> None:
    played = group(["hm", "hm", "hm"], max_turns=1)
    assert {member.outcome for member in played} == {Outcome.TURN_LIMIT}
    assert [rewards(member) for member in played] == [[0.0]] * 3
    assert {member.metrics["reward/verifiers_group/is_cut_off"] for member in played} == {1.0}


def test_a_group_that_is_scored_one_by_one_is_told_of_its_reward() -> None:
    played = attempt(["4"], row={"arguments": '{"fault": "group"}'})
    assert played.outcome is Outcome.REWARD_ERROR
    assert '{"verifiers/sums": "verifiers_group"}' in str(played.failure)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"environment": ""}, "write rows with"),
        ({"speed": 1}, "write rows with"),
        ({"task": "[]"}, "environment_kwargs.task must be a JSON object"),
        ({"arguments": "{"}, "environment_kwargs.arguments must be a JSON object"),
        ({"environment": "no_such"}, "'no_such' cannot be imported"),
        ({"arguments": '{"colour": 1}'}, 'refuses {"colour": 1}'),
    ],
)
def test_rows_that_make_no_sense_are_refused(row, says) -> None:
    played = attempt(["4"], row=row)
    assert played.outcome is Outcome.ABORTED
    assert says in " ".join(str(played.failure).split())


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"python": "/no/such/python"}, "verifiers.python='/no/such/python' is no program"),
        ({"path": ["/no/such/folder"]}, "'/no/such/folder' is no folder"),
        ({"pass_env": ["NO_SUCH_VARIABLE"]}, "NO_SUCH_VARIABLE"),
        ({"colour": 1}, "colour"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(config, says) -> None:
    played = attempt(["4"], config=config)
    assert played.outcome is Outcome.ABORTED
    assert says in str(played.failure)


def test_an_agent_without_the_environment_is_refused() -> None:
    played = play(["4"], agent="verifiers")
    assert played.outcome is Outcome.ABORTED
    assert "needs the environment 'verifiers'" in str(played.failure)


def data(out: Path, *arguments: str) -> None:
    options = ["--environment=sums", f"--python={sys.executable}", f"--path={SMALL}"]
    result = CliRunner().invoke(
        app, ["data", "verifiers", str(out), *options, *arguments], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output


def test_rows_are_written_and_can_be_played(tmp_path: Path) -> None:
    data(tmp_path, "--train=6", "--val=2", '--arguments={"size": 5}')
    train, val = (pq.read_table(tmp_path / f"{split}.parquet").to_pylist() for split in ("train", "val"))
    assert [row["prompt"][0]["content"] for row in (*val, *train)] == [f"{i} + 1?" for i in range(5)]
    assert (len(val), len(train)) == (2, 3)
    assert {row["agent_name"] for row in train} == {"verifiers"}
    world = dict(train[0]["extra_info"]["environment_kwargs"])
    assert world.pop("name") == "verifiers"
    assert rewards(attempt(["3"], row=world)) == [1.0]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--val=8"], DataError),
        (["--arguments=["], ConfigError),
        (["--arguments=[]"], ConfigError),
        (["--environment=no_such"], DataError),
        (["--python=/no/such/python"], ConfigError),
    ],
)
def test_options_that_make_no_sense_are_one_line(tmp_path: Path, arguments, error) -> None:
    with pytest.raises(UserError) as refused:
        data(tmp_path, *arguments)
    assert type(refused.value) is error
    assert "\n" not in str(refused.value)
    assert not [*tmp_path.iterdir()]
