"""The real verifiers, of both generations, each of a pinned version in an environment of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.config.agent import AgentConfig
from agentrl.config.reward import RewardConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.plugins import load_plugins
from agentrl.rollout.conversation_line import PromptLimits
from agentrl.testing import Call, ScriptedModel, Stage, play, tiny_chat
from agentrl.types import Message, Outcome, Task
from parts.installed import interpreter_with

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "verifiers_environments"
CURRENT, EARLIER = "verifiers==0.4.0", "verifiers==0.1.14"

WITH_A_TOOL = '''
import verifiers.v1 as vf

__all__ = ["Sums"]


class Adding(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class SumsConfig(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class SumsTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "5")


class Sums(vf.Taskset[SumsTask, SumsConfig]):
    def load(self):
        data = vf.TaskData(prompt="2 + 3?", system_prompt="Add.")
        return [SumsTask(data, self.config.task) for _ in range(3)]

    @classmethod
    def toolsets(cls, config):
        return [Adding(config.tools)]


if __name__ == "__main__":
    Adding.run()
'''

OF_V0 = """
import verifiers as vf
from datasets import Dataset


def load_environment(size: int = 4):
    rows = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(size)]

    def right(completion, answer):
        return float(completion[-1]["content"] == answer)

    def length(completion):
        return float(len(completion[-1]["content"]))

    rubric = vf.Rubric(funcs=[right, length], weights=[1.0, 0.0])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric, system_prompt="Add.")
"""

OF_V0_IN_GROUPS = """
import verifiers as vf
from datasets import Dataset


def load_environment():
    rows = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(4)]

    def shortest(completions, answers) -> list[float]:
        said = [completion[-1]["content"] for completion in completions]
        right = [text for text, answer in zip(said, answers) if text.startswith(answer)]
        return [float(bool(right) and text == min(right, key=len)) for text in said]

    def length(completion):
        return float(len(completion[-1]["content"]))

    rubric = vf.Rubric(funcs=[shortest, length], weights=[1.0, 0.0])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric)
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def current() -> str:
    return interpreter_with(CURRENT)


def rows_of(out: Path, environment: str, python: str, folder: Path, *arguments: str) -> list[dict]:
    given = ["verifiers", str(out), f"--environment={environment}", f"--python={python}", f"--path={folder}"]
    result = CliRunner().invoke(app, ["data", *given, *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return pq.read_table(out / "train.parquet").to_pylist()


def attempt(row: dict, python: str, folder: Path, turns, **settings):
    world = {key: value for key, value in row["extra_info"]["environment_kwargs"].items() if key != "name"}
    return play(
        turns,
        agent="verifiers",
        environment="verifiers",
        environment_kwargs=world,
        environment_config={"verifiers": {"python": python, "path": [str(folder)]}},
        reward="verifiers",
        **{"max_turns": 4, "trajectory_timeout_s": 240.0, "max_response_tokens": 2000, **settings},
    )


def rewards(played) -> list[float]:
    assert played.failure is None, played.failure
    return [event.value for event in played.rewards]


def test_a_taskset_is_played_and_scored(current, tmp_path) -> None:
    row, *_ = rows_of(tmp_path, "larger_number", current, EXAMPLES, "--train=2", "--val=1")
    answer = json.loads(row["extra_info"]["environment_kwargs"]["task"])["answer"]
    assert answer in row["prompt"][0]["content"]
    right = attempt(row, current, EXAMPLES, [answer])
    assert rewards(right) == [1.0]
    assert right.segment_starts == (0,)
    assert right.metrics["reward/verifiers/length"] == 2.0
    assert rewards(attempt(row, current, EXAMPLES, ["neither"])) == [0.0]


def test_its_tools_are_called_and_their_answers_are_context(current, tmp_path) -> None:
    (tmp_path / "sums.py").write_text(WITH_A_TOOL)
    row, *_ = rows_of(tmp_path / "rows", "sums", current, tmp_path, "--train=2", "--val=1")
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    played = attempt(row, current, tmp_path, [Call("add", {"a": 2, "b": 3}), "5"])
    assert rewards(played) == [1.0]
    assert [message.role for message in played.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert played.messages[3].content == "5"
    assert played.segment_starts == (0,)
    assert played.metrics["num_tool_calls"] == 1.0


def test_a_budget_of_the_run_cuts_an_attempt_off(current, tmp_path) -> None:
    (tmp_path / "sums.py").write_text(WITH_A_TOOL)
    row, *_ = rows_of(tmp_path / "rows", "sums", current, tmp_path, "--train=2", "--val=1")
    played = attempt(row, current, tmp_path, [Call("add", {"a": 2, "b": 3})] * 3, max_turns=2)
    assert played.outcome is Outcome.TURN_LIMIT, played.failure
    assert played.metrics["reward/verifiers/is_cut_off"] == 1.0


def test_a_server_that_does_not_answer_is_a_failure_of_the_model(current, tmp_path) -> None:
    row, *_ = rows_of(tmp_path, "larger_number", current, EXAMPLES, "--train=2", "--val=1")
    played = attempt(row, current, EXAMPLES, [])
    assert (played.outcome, played.rewards) == (Outcome.MODEL_ERROR, ())


def test_an_environment_of_the_earlier_generation_is_played_and_scored(tmp_path) -> None:
    python = interpreter_with(EARLIER)
    (tmp_path / "old_sums.py").write_text(OF_V0)
    row, *_ = rows_of(
        tmp_path / "rows", "old_sums", python, tmp_path, "--train=2", "--val=1", '--arguments={"size": 3}'
    )
    assert [message["content"] for message in row["prompt"]] == ["Add.", "1 + 1?"]
    right = attempt(row, python, tmp_path, ["2"])
    assert rewards(right) == [1.0]
    assert right.metrics["reward/verifiers/length"] == 1.0
    assert rewards(attempt(row, python, tmp_path, ["11"])) == [0.0]
    assert rewards(attempt(row, python, tmp_path, [""])) == [0.0], "an empty turn is wrong, and no failure"


def test_a_group_of_the_earlier_generation_is_scored_together(tmp_path) -> None:
    python = interpreter_with(EARLIER)
    (tmp_path / "groups.py").write_text(OF_V0_IN_GROUPS)
    row, *_ = rows_of(tmp_path / "rows", "groups", python, tmp_path, "--train=2", "--val=1")
    plugins = load_plugins()
    task = Task(
        task_id="t",
        data_source="verifiers/groups",
        messages=(Message("user", "1 + 1?"),),
        agent_name=plugins.agents.resolve("verifiers"),
        environment_kwargs=row["extra_info"]["environment_kwargs"],
    )
    waiting = iter(["2", "2, I think", ""])
    stage = Stage(
        ScriptedModel(tiny_chat(), lambda turn, prompt: next(waiting)),
        plugins=plugins,
        agent=AgentConfig(
            environment_config={"verifiers": {"python": python, "path": [str(tmp_path)]}},
            trajectory_timeout_s=240.0,
        ),
        rollout=RolloutConfig(group_size=3),
        reward=RewardConfig(sources={"verifiers/groups": "verifiers_group"}),
        prompt=PromptLimits(200, "error"),
    )
    played = stage.play(task, n=3)
    said = {member.messages[-1].content: rewards(member) for member in played}
    assert said == {"2": [1.0], "2, I think": [0.0], "": [0.0]}
    lengths = {member.metrics["reward/verifiers_group/length"] for member in played}
    assert lengths == {1.0, 10.0, 0.0}
