"""Rows and rewards of reasoning-gym: what a row says is enough to make and score its task again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.config.data import DataConfig
from agentrl.data.dataset import Dataset
from agentrl.data.rows import AgentChoice
from agentrl.errors import ConfigError, DataError, PluginError, RewardError, UserError
from agentrl.extras.hubs.generated import Generated, data_set
from agentrl.extras.hubs.packages import hub_package
from agentrl.extras.hubs.reasoning_gym import ReasoningGym
from agentrl.extras.hubs.reasoning_gym_rows import read_mix
from agentrl.extras.testing.contracts.rewards import attempt_of
from agentrl.testing import play
from agentrl.testing.contracts import RewardExample
from agentrl.types import Outcome, Task
from parts.generators import origin, small_generators

pytestmark = pytest.mark.usefixtures("generators")


@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with small_generators(monkeypatch):
        yield


def data(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["data", "reasoning_gym", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def tasks(path: Path) -> list[Task]:
    agents = AgentChoice(lambda name: name, "single_turn_agent")
    rows = Dataset([str(path)], DataConfig(), agents=agents, seed=0, shuffle=False)
    return [rows.task(position) for position in range(len(rows))]


def score(says: str, **row: object):
    return play([says], agent="single_turn_agent", reward=ReasoningGym, **row)


# ------------------------------------------------------------------------------------------------------- rows


def test_a_row_is_enough_to_make_its_task_again(tmp_path: Path) -> None:
    said = data(tmp_path, "--generators", "sums,puzzle24", "--train", 5, "--val", 3, "--seed", 7)
    assert "train.parquet: 5 rows" in said
    for split, number in (("train", 5), ("val", 3)):
        found = tasks(tmp_path / f"{split}.parquet")
        assert len(found) == number
        for task in found:
            entry = Generated.of(task).entry()
            assert task.messages[-1].content == task.extra_info["question"] == entry["question"]
            assert task.ground_truth == entry["answer"]
            assert task.data_source == f"reasoning_gym/{Generated.of(task).generator}"
            ReasoningGym().check(task)
        assert [task.data_source.endswith("sums") for task in found] == [n % 2 == 0 for n in range(number)]


def test_the_same_arguments_write_the_same_rows_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 1000)):
        data(tmp_path / name, "--generators", "sums", "--train", 4, "--val", 2, "--seed", seed)
    a, b, c = (pq.read_table(tmp_path / name / "train.parquet") for name in "abc")
    assert a.equals(b)
    assert not a.equals(c)


def test_no_question_is_in_both_files(tmp_path: Path) -> None:
    config = json.dumps({"sums": {"largest": 3}})
    said = data(tmp_path, "--generators=sums", "--train=60", "--val=4", "--config", config)
    train, val = (
        {task.extra_info["question"] for task in tasks(tmp_path / f"{split}.parquet")}
        for split in ("train", "val")
    )
    assert train
    assert not train & val
    assert "left out" in said


def test_a_generator_that_makes_other_tasks_in_each_process_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    with pytest.raises(ConfigError, match="'hashed' makes another task of item 0 in each process"):
        data(tmp_path, "--generators=sums,hashed", "--train=4", "--val=2")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (["--generators=sum"], PluginError, "did you mean sums?"),
        (["--generators=zzz"], PluginError, "it has hashed, puzzle24, sums, unread"),
        (["--generators=sums,sums"], ConfigError, "each once"),
        (["--generators=unread"], PluginError, "evaluates text"),
        (["--generators=sums", "--config={"], ConfigError, "not valid JSON"),
        (["--generators=sums", '--config={"gcd": {}}'], ConfigError, "not in --generators"),
        (["--generators=sums", '--config={"sums": {"size": 3}}'], ConfigError, "set by --seed"),
        (["--generators=sums", '--config={"sums": {"colour": 3}}'], ConfigError, "colour"),
        (["--generators=sums", '--config={"sums": {"largest": 0}}'], ConfigError, "must be positive"),
        (["--generators=sums", '--config={"sums": {"largest": 1}}'], DataError, "lower --val"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, arguments, error, says) -> None:
    with pytest.raises(UserError) as raised:
        data(tmp_path, *arguments)
    assert type(raised.value) is error
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_package_that_is_missing_is_named_with_its_extra() -> None:
    with pytest.raises(PluginError, match=r"'no_such_package'.*agentrl\[worlds\]"):
        hub_package("no_such_package.inside", extra="worlds", needed_by="here")


def test_the_generators_config_is_in_the_row() -> None:
    mix = read_mix("a, b", '{"b": {"y": 1, "x": 2}}')
    assert mix.generators == ("a", "b")
    assert mix.configs == {"a": "{}", "b": '{"x": 2, "y": 1}'}


# ----------------------------------------------------------------------------------------------------- reward


def answer_of(extra_info: dict) -> str:
    return Generated(**extra_info["reasoning_gym"]).entry()["answer"]


def test_the_generator_scores_in_a_process_of_its_own() -> None:
    right = score(f"so <answer>{answer_of(origin())}</answer>", extra_info=origin())
    assert [event.value for event in right.rewards] == [1.0], right.failure
    assert right.metrics["reward/reasoning_gym/accuracy"] == 1.0


@pytest.mark.parametrize("row", [{}, {"index": 9}, {"index": "1"}, {"seed": True}, {"place": 3}])
def test_a_row_without_an_origin_is_refused(row: dict) -> None:
    extra_info = origin(**row) if row else {}
    task = Task("t", "reasoning_gym/sums", (), "single_turn_agent", None, extra_info=extra_info)
    with pytest.raises(DataError, match=r"extra_info\.reasoning_gym"):
        ReasoningGym().check(task)


def test_another_version_of_the_package_is_no_wrong_answer() -> None:
    played = score("<answer>1</answer>", extra_info={**origin(), "question": "1 + 1, in an older version?"})
    assert played.outcome is Outcome.REWARD_ERROR
    assert "write the rows again" in str(played.failure)


def test_a_scorer_changes_no_other_attempts_entry() -> None:
    """The small package's scorer removes what it read."""
    right = RewardExample(f"<answer>{answer_of(origin())}</answer>", 1.0, extra_info=origin())
    assert [ReasoningGym().score(attempt_of(right)).value for _ in range(2)] == [1.0, 1.0]


def test_an_answer_that_was_not_given_scores_like_none() -> None:
    row = {"extra_info": origin("puzzle24")}
    for says, value in (("0+1", 1.0), ("0+2", 0.0), ("[1][0]", 0.01), ("\n 0+1", 1.0)):
        example = RewardExample(f"<answer>{says}</answer>", value, **row)
        assert ReasoningGym().score(attempt_of(example)).value == value


def test_a_data_set_is_made_once() -> None:
    assert data_set("sums", 1, 2, "{}") is data_set("sums", 1, 2, "{}")


def test_a_row_of_another_version_raises_in_rehearsal() -> None:
    extra_info = {**origin(), "question": "another"}
    task = Task("t", "reasoning_gym/sums", (), "single_turn_agent", None, extra_info=extra_info)
    with pytest.raises(RewardError, match="another question"):
        ReasoningGym().rehearse(task)
