# ruff: noqa: RUF012 - the attributes of contracts are read, never written
"""The contracts, for every plugin that is registered: built in, or of a package that is installed."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.plugins import RewardResult, load_plugins
from agentrl.testing import Says, call
from agentrl.testing.contracts import (
    AgentContract,
    EnvironmentContract,
    InteractionContract,
    RewardContract,
    RewardExample,
    ToolContract,
)
from parts.generators import origin, small_generators
from parts.json_server import completion, json_server
from parts.openenv_server import counting, openenv_server
from parts.textarena_world import CONFIG as TEXTARENA
from parts.verifiers_world import CONFIG, TASK

# ------------------------------------------------------------------------------------------------------ tools


class TestCalculator(ToolContract):
    tool = "calculator"
    valid_calls = ({"expression": "6*7"}, {"expression": "1/3"})


class TestCalcGsm8kReward(ToolContract):
    tool = "calc_gsm8k_reward"
    valid_calls = ({"answer": "1"}, {"answer": "42"}, {"answer": "42"})
    create_kwargs = {"ground_truth": "42"}


class TestFinish(ToolContract):
    tool = "finish"
    valid_calls = ({"answer": "42"},)


class TestPython(ToolContract):
    tool = "python"
    valid_calls = ({"code": "open('n', 'w').write('42')"}, {"code": "print(open('n').read())"})


class TestSearch(ToolContract):
    tool = "search"
    valid_calls = ({"query": "purring cats"}, {"query": "zebra"})

    @pytest.fixture(autouse=True)
    def corpus(self, tmp_path: Path) -> None:
        documents = {
            "id": ["1", "2"],
            "title": ["Cats", "Dogs"],
            "text": ["Cats purr.", "Dogs bark at cats."],
        }
        pq.write_table(pa.table(documents), tmp_path / "documents.parquet")
        self.config = {"corpus": str(tmp_path / "documents.parquet")}


class TestRetrieve(ToolContract):
    tool = "retrieve"
    valid_calls = ({"query": "purring cats"}, {"query": "zebra"})

    @pytest.fixture(autouse=True)
    def server(self) -> Iterator[None]:
        documents = [{"document": {"contents": "Cats\nCats purr."}, "score": 1.0}]
        with json_server(lambda body: {"result": [documents for _ in body["queries"]]}) as url:
            self.config = {"url": f"{url}/retrieve"}
            yield


# ---------------------------------------------------------------------------------------------- environments


class TestWorkspace(EnvironmentContract):
    environment = "workspace"
    environment_kwargs = {"files": {"a.txt": "hello\n"}}
    bad_kwargs = (
        {"files": {"../a": "x"}},
        {"files": {"a": 1}},
        {"archive": "/nowhere"},
        {"image": "debian"},
        {"file": {"a": "x"}},
    )
    calls = (
        ("bash", {"command": "cat a.txt"}),
        ("python", {"code": "x = 6 * 7"}),
        ("edit", {"path": "a.txt", "old": "hello", "new": "goodbye"}),
    )


class TestRepository(EnvironmentContract):
    environment = "repository"
    environment_kwargs = {
        "files": {"a.py": "x = 1\n"},
        "tests": {
            "t.py": "import unittest, a\nclass T(unittest.TestCase):\n def test(self): assert a.x == 2\n"
        },
        "fail_to_pass": ["t.T.test"],
    }
    bad_kwargs = (
        {},
        {**environment_kwargs, "fail_to_pass": "no JSON"},
        {**environment_kwargs, "runner": "nose"},
        {**environment_kwargs, "test_patch": "--- a/b.py\n+++ b/b.py\n@@ -1 +1 @@\n-a\n+b\n"},
    )
    calls = (
        ("bash", {"command": "cat a.py"}),
        ("python", {"code": "1 + 1"}),
        ("edit", {"path": "a.py", "old": "1", "new": "2"}),
    )


def terminal_task() -> str:
    """Return the folder of a task in Harbor's layout."""
    folder = Path(tempfile.mkdtemp(prefix="agentrl-task-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "tests").mkdir()
    (folder / "task.toml").write_text('version = "1.0"\n')
    (folder / "instruction.md").write_text("Do something.\n")
    (folder / "tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    return str(folder)


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
class TestTerminal(EnvironmentContract):
    environment = "terminal"
    config = {"kind": "bubblewrap"}
    environment_kwargs = {"task": terminal_task()}
    bad_kwargs = ({}, {"task": "/nowhere"}, {**environment_kwargs, "image": "/nowhere"})
    calls = (
        ("bash", {"command": "ls"}),
        ("python", {"code": "1 + 1"}),
        ("edit", {"path": "a.txt", "old": "", "new": "text"}),
    )


class TestGymnasium(EnvironmentContract):
    environment = "gymnasium"
    environment_kwargs = {"game": "FrozenLake-v1", "seed": 3}
    bad_kwargs = (
        {},
        {"game": "FrozenLike-v1"},
        {"game": "os:FrozenLake-v1"},
        {"game": "FrozenLake-v1", "seed": -1},
        {"game": "FrozenLake-v1", "options": "[]"},
        {"game": "FrozenLake-v1", "options": '{"colour": 1}'},
        {"game": "FrozenLake-v1", "speed": 1},
    )
    calls = (("act", {"action": "down"}),)


class TestOpenEnv(EnvironmentContract):
    environment = "openenv"
    environment_kwargs = {"server": "s", "reset": '{"seed": 3}', "shown": "text", "field": "say"}
    bad_kwargs = ({}, {"server": "t"}, {"server": "s", "reset": "[]"}, {"server": "s", "speed": 1})
    calls = (("act", {"action": {"say": "3"}}), ("call", {"tool": "t", "arguments": {}}))

    @pytest.fixture(autouse=True)
    def server(self) -> Iterator[None]:
        with openenv_server(counting) as url:
            self.config = {"servers": {"s": {"url": url}}}
            yield


class TestVerifiersEnvironment(EnvironmentContract):
    environment = "verifiers"
    config = CONFIG
    environment_kwargs = {"environment": "sums", "task": json.dumps(TASK)}
    bad_kwargs = ({}, {"environment": "sums"}, {**environment_kwargs, "speed": 1})


class TestTextArenaGame(EnvironmentContract):
    environment = "textarena"
    config = TEXTARENA
    environment_kwargs = {"game": "Climb-v0", "seed": 3}
    bad_kwargs = (
        {},
        {"game": "Clime-v0"},
        {"game": "Climb-v0", "seed": -1},
        {"game": "Climb-v0", "options": "[]"},
        {"game": "Climb-v0", "options": '{"colour": 1}'},
        {"game": "Climb-v0", "players": 2},
        {"game": "Climb-v0", "seat": 0},
        {"game": "Climb-v0", "speed": 1},
    )
    calls = (("act", {"action": "1"}),)


# ----------------------------------------------------------------------------------------------- interactions


class TestOpenEnvPartner(InteractionContract):
    interaction = "openenv"
    says = ("3", "4")
    bad_kwargs = ({"speed": 1},)
    environment = "openenv"
    environment_kwargs = TestOpenEnv.environment_kwargs

    @pytest.fixture(autouse=True)
    def server(self) -> Iterator[None]:
        with openenv_server(counting) as url:
            self.environment_config = {"servers": {"s": {"url": url}}}
            yield


class TestGsm8kInteraction(InteractionContract):
    interaction = "gsm8k"
    says = ("#### 41", "#### 42")
    interaction_kwargs = {"ground_truth": "42"}
    bad_kwargs = ({}, {"ground_truth": "many"})


class TestScripted(InteractionContract):
    interaction = "scripted"
    says = ("hello", "the answer is 42")
    interaction_kwargs = {
        "replies": ["and?", "go on"],
        "rules": [{"pattern": "42", "done": True, "score": 1.0}],
    }
    bad_kwargs = (
        {},
        {"replies": "text"},
        {"rules": ["text"]},
        {"rules": [{"pattern": "(", "reply": "x"}]},
        {"rules": [{"pattern": "a"}]},
        {"rules": [{"pattern": "a", "reply": "x", "reward": "much"}]},
    )


class TestSimulatedUser(InteractionContract):
    interaction = "simulated_user"
    says = ("Which size?", "Here you are.")
    interaction_kwargs = {"goal": "a pair of shoes"}
    bad_kwargs = ({},)

    @pytest.fixture(autouse=True)
    def server(self) -> Iterator[None]:
        with json_server(
            lambda body: completion(
                "[DONE]" if "Here" in body["messages"][-1]["content"] else "Large, please."
            )
        ) as url:
            self.config = {"url": url, "success_phrase": "[DONE]"}
            yield


# ----------------------------------------------------------------------------------------------------- agents


class TestSingleTurnAgent(AgentContract):
    agent = "single_turn_agent"
    turns = ("42",)


class TestToolAgent(AgentContract):
    agent = "tool_agent"
    turns = ("42",)
    never_done = Says("let me see", (call("probe"),))
    tool_turn = call("probe")


class TestInteractionAgent(AgentContract):
    agent = "interaction_agent"
    turns = ("#### 41", "#### 42")
    never_done = "#### 1"
    tool_turn = call("probe")
    interaction = "gsm8k"
    interaction_kwargs = {"ground_truth": "42"}


class TestReactAgent(AgentContract):
    agent = "react_agent"
    turns = ("Thought: easy\nFinal Answer: 42",)
    never_done = "Thought: hm\nAction: probe\nAction Input: {}"
    tool_turn = "Thought: hm\nAction: probe\nAction Input: {}"


class TestMathExpression(AgentContract):
    agent = "math_expression"
    turns = ("6*7", "#### 42")
    tools = ("calculator",)


ASK_UNTIL_DONE = """
from openai import OpenAI

def ask(task, *, base_url, api_key, model):
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = list(task["messages"])
    for _ in range(10):
        text = client.chat.completions.create(model=model, messages=messages).choices[0].message.content
        if "42" in text:
            return
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
"""


class TestOpenAIAgent(AgentContract):
    agent = "openai_agent"
    turns = ("hm", "42")

    @pytest.fixture(autouse=True)
    def program(self, tmp_path: Path) -> None:
        (tmp_path / "program.py").write_text(ASK_UNTIL_DONE)
        self.config = {"target": f"{tmp_path}/program.py:ask"}


class TestVerifiersAgent(AgentContract):
    agent = "verifiers"
    turns = ("hm", "4")
    settings = {
        "environment": "verifiers",
        "environment_kwargs": TestVerifiersEnvironment.environment_kwargs,
        "environment_config": {"verifiers": CONFIG},
    }


class TestTextArenaAgent(AgentContract):
    agent = "textarena"
    turns = ("2", "2")
    settings = {
        "environment": "textarena",
        "environment_kwargs": TestTextArenaGame.environment_kwargs,
        "environment_config": {"textarena": TEXTARENA},
    }


# ---------------------------------------------------------------------------------------------------- rewards


class TestArithmetic(RewardContract):
    reward = "arithmetic"
    examples = (RewardExample("#### 42", 1.0, "42"), RewardExample("42", 0.0, "42"))
    bad_rows = ({}, {"ground_truth": "x"})


class TestGsm8kReward(RewardContract):
    reward = "gsm8k"
    config = {"format_score": 0.1}
    examples = (
        RewardExample("so #### 42", 1.0, "42"),
        RewardExample("#### 41", 0.1, "42"),
        RewardExample("no idea", 0.0, "42"),
    )
    bad_rows = ({}, {"ground_truth": "x"})


class TestMath(RewardContract):
    reward = "math"
    examples = (RewardExample(r"\boxed{\frac{1}{2}}", 1.0, "0.5"), RewardExample(r"\boxed{2}", 0.0, "0.5"))
    bad_rows = ({}, {"ground_truth": True})


class TestAime(RewardContract):
    reward = "aime"
    examples = (RewardExample(r"\boxed{042}", 1.0, 42), RewardExample(r"\boxed{41}", 0.0, 42))
    bad_rows = ({}, {"ground_truth": "1000"})


class TestLengthPenalty(RewardContract):
    reward = "length_penalty"
    config = {"max_tokens": 1000, "buffer_tokens": 500}
    examples = (
        RewardExample("x" * 500, 0.0),
        RewardExample("x" * 750, -0.5),
        RewardExample("x" * 2000, -1.0),
    )


class TestFormat(RewardContract):
    reward = "format"
    config = {"form": "answer_line"}
    examples = (RewardExample("#### 42", 1.0), RewardExample("42", 0.0))


class TestFormatByPattern(RewardContract):
    reward = "format"
    config = {"pattern": r".*\d+"}
    examples = (RewardExample("it is 42", 1.0), RewardExample("many", 0.0))


class TestCode(RewardContract):
    reward = "code"
    examples = (
        RewardExample(
            "```python\nprint(int(input()) * 2)\n```", 1.0, {"inputs": ["1", "21"], "outputs": ["2", "42"]}
        ),
        RewardExample("```python\nprint(2)\n```", 0.5, {"inputs": ["1", "21"], "outputs": ["2", "42"]}),
        RewardExample("no code", 0.0, {"inputs": ["1"], "outputs": ["2"]}),
    )
    bad_rows = ({}, {"ground_truth": "no cases"}, {"ground_truth": {"inputs": ["1"], "outputs": []}})


class TestRemote(RewardContract):
    reward = "remote"
    examples = (RewardExample("good", 1.0, "x"), RewardExample("bad", 0.0, "x"))

    @pytest.fixture(autouse=True)
    def server(self) -> Iterator[None]:
        with json_server(lambda body: {"score": float("good" in body["solution_str"])}) as url:
            self.config = {"url": url, "max_retries": 0}
            yield


class TestExactMatch(RewardContract):
    reward = "exact_match"
    examples = (
        RewardExample("<answer>The Eiffel Tower!</answer>", 1.0, ["eiffel tower", "la tour Eiffel"]),
        RewardExample("<answer>Big Ben</answer>", 0.0, {"target": "Eiffel Tower"}),
        RewardExample("Eiffel Tower", 0.0, "Eiffel Tower"),
    )


class TestReasoningGym(RewardContract):
    reward = "reasoning_gym"
    examples = (
        RewardExample("<answer>3</answer>", 0.0, extra_info=origin()),
        RewardExample("<answer>1</answer>", 1.0, extra_info=origin("puzzle24")),
        RewardExample("<answer>many</answer>", 0.0, extra_info=origin()),
        RewardExample("no tags", 0.01, extra_info=origin()),
    )
    bad_rows = ({}, {"extra_info": origin(index=9)})

    @pytest.fixture(autouse=True)
    def package(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with small_generators(monkeypatch):
            yield


class TestLLMJudge(RewardContract):
    reward = "llm_judge"
    examples = (RewardExample("good", 1.0, "x"), RewardExample("bad", 0.0, "x"))

    @pytest.fixture(autouse=True)
    def server(self) -> Iterator[None]:
        with json_server(
            lambda body: completion(f"Score: {10 if 'good' in body['messages'][-1]['content'] else 0}")
        ) as url:
            self.config = {
                "url": f"{url}/v1",
                "model": "judge",
                "max_retries": 0,
                "prompt": "Is this fine? $answer",
            }
            yield


class TestRewardModel(RewardContract):
    """A stand-in for the run's model, which needs a cluster: the longer an answer, the better."""

    reward = "reward_model"
    examples = (RewardExample("good", 4.0), RewardExample("better", 6.0), RewardExample("", None))

    def _new(self):
        reward = super()._new()
        reward.connect(
            lambda attempts: [
                RewardResult(float(len(one.answer))) if one.answer else None for one in attempts
            ]
        )
        return reward


class TestTestsPass(RewardContract):
    reward = "tests_pass"
    examples = (RewardExample(("look", "done"), None),)  # an attempt without a repository


class TestTerminalReward(RewardContract):
    reward = "terminal"
    examples = (RewardExample(("look", "done"), None),)  # an attempt without a terminal


class TestOpenEnvReward(RewardContract):
    reward = "openenv"
    examples = (RewardExample(("look", "done"), None),)  # an attempt without an episode


class TestVerifiersReward(RewardContract):
    reward = "verifiers"
    examples = (RewardExample(("look", "done"), None),)  # an attempt without its environment


class TestVerifiersGroupReward(RewardContract):
    reward = "verifiers_group"
    examples = (RewardExample(("look", "done"), None),)  # an attempt without its environment


class TestTextArenaReward(RewardContract):
    reward = "textarena"
    examples = (RewardExample(("look", "done"), None),)  # an attempt without a game


class TestTau2Reward(RewardContract):
    reward = "tau2"
    goal = json.dumps({"database": {}, "told": ["600"], "actions": [], "basis": ["DB", "COMMUNICATE"]})
    examples = (RewardExample(("look", "done"), None, ground_truth=goal),)  # an attempt without a database
    bad_rows = ({"ground_truth": ""}, {"ground_truth": "{}"}, {"ground_truth": "[]"})


class TestGameReward(RewardContract):
    reward = "gymnasium"
    examples = (RewardExample(("look", "done"), None),)  # an attempt without a game


# ------------------------------------------------------------------------------------------------ all of them

CONTRACTS = (
    ("tools", ToolContract, "tool"),
    ("interactions", InteractionContract, "interaction"),
    ("environments", EnvironmentContract, "environment"),
    ("agents", AgentContract, "agent"),
    ("rewards", RewardContract, "reward"),
)


@pytest.mark.parametrize(("kind", "contract", "attribute"), CONTRACTS, ids=[kind for kind, _, _ in CONTRACTS])
def test_every_registered_plugin_has_its_contract_here(kind, contract, attribute) -> None:
    tested = {getattr(cls, attribute) for cls in contract.__subclasses__() if cls.__module__ == __name__}
    assert set(getattr(load_plugins(), kind).names()) == tested
