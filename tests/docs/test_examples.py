"""The examples and the code of the documents: they are loaded and used exactly as a reader would."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.config.agent import AgentConfig
from agentrl.config.compose import load_config
from agentrl.config.reward import RewardConfig
from agentrl.extras.testing.one_row.play import play_row
from agentrl.plugins import Attempted, Plugins, WrongCall, load_plugins
from agentrl.rewards.select import RewardTable
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.rollout.shared_tools import SharedTools
from agentrl.rollout.toolbox import Toolbox
from agentrl.testing import Call, call, play
from agentrl.types import Message, Outcome, Task, ToolCall

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "word_length_tool.py"


def code_blocks(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), flags=re.DOTALL)


@pytest.fixture(scope="module")
def documented(tmp_path_factory: pytest.TempPathFactory) -> Plugins:
    """All plugins of docs/agents.md, tools.md, interactions.md and rewards.md, loaded from files."""
    folder = tmp_path_factory.mktemp("documented")
    files = []
    pages = ("agents", "tools", "interactions", "rewards")
    blocks = [block for page in pages for block in code_blocks(f"docs/{page}.md") if "Contract)" not in block]
    for index, block in enumerate(block for block in blocks if "\nclass " in block or "\n@tool" in block):
        files.append(folder / f"plugin_{index}.py")
        files[-1].write_text(block)
    return load_plugins(map(str, files))


class Characters:
    """A tokenizer whose tokens are characters."""

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_the_example_answers_right_and_wrong_calls_as_the_rollout_makes_them():
    async def main() -> list[tuple[str, bool]]:
        with AsyncioHost() as host:
            shared = SharedTools(
                load_plugins([str(EXAMPLE)]).tools, AgentConfig(), host=host, codec=Characters()
            )
            toolbox = Toolbox(["word_length"], shared, tools_kwargs={}, key="t")
            arguments = ({"word": "trajectory"}, {"word": "two words"}, {})
            results = await toolbox.answer(
                [ToolCall(str(i), "word_length", given) for i, given in enumerate(arguments)]
            )
            await toolbox.close()
            return [(result.text, result.is_error) for result in results]

    right, two_words, no_word = trio.run(main)
    assert right == ("10", False)
    assert two_words == ("error: 'two words' is not one word", True)
    assert no_word[1]
    assert '"word" is a required property' in no_word[0]


def test_the_readme_shows_the_example_as_it_is():
    (shown,) = code_blocks("README.md")
    assert shown in EXAMPLE.read_text()


def test_the_shop_is_shown_as_it_is_and_is_a_page():
    shop = (ROOT / "examples" / "shop.py").read_text()
    shown = [block for block in code_blocks("docs/tools.md") if block.startswith("class ")]
    assert [block.split("(")[0] for block in shown] == ["class Shop", "class Delivered"]
    assert all(block in shop for block in shown)
    assert len(shop.splitlines()) <= 60


def test_the_shop_keeps_the_contracts_as_the_page_tests_it(monkeypatch):
    """The page's tests of the page's shop, each law once."""
    monkeypatch.chdir(ROOT)
    (block,) = [block for block in code_blocks("docs/tools.md") if "Contract)" in block]
    page: dict[str, Any] = {"__name__": "page"}
    exec(block, page)
    tests = [value for name, value in page.items() if name.startswith("Test")]
    laws = [(test, law) for test in tests for law in dir(test) if law.startswith("test_")]
    assert len(tests) == 3
    for test, law in laws:
        getattr(test(), law)()


def test_the_shop_believes_the_database_alone(tmp_path):
    """Row 0 of its data, played three times: who only says that it ordered earns nothing."""
    command = [sys.executable, "examples/shop_rows.py", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    write_tiny_tokenizer(tmp_path / "model")
    given = [f"data.train_files=[{tmp_path}/train.jsonl]", f"model.path={tmp_path}/model"]
    config = load_config(
        str(ROOT / "examples" / "shop.yaml"), [*given, f"agent.plugins=[{ROOT}/examples/shop.py]"]
    )
    row = json.loads((tmp_path / "train.jsonl").read_text().splitlines()[0])
    [(item, pieces)] = row["reward_model"]["ground_truth"].items()
    order = {"calls": [{"name": "order", "arguments": {"item": item, "pieces": pieces}}]}
    scripts = {"claims": ["done", "done"], "orders": [order, "done"], "complies": ["done", order, "done"]}
    rewards, facts = {}, {}
    for name, turns in scripts.items():
        (tmp_path / "turns.yaml").write_text(json.dumps(turns))
        played = play_row(config, row=0, model=str(tmp_path / "turns.yaml"), read=lambda: None, say=print)
        rewards[name] = played.trajectory.reward
        facts[name] = played.trajectory.extra_info["environment_facts"]
    assert rewards == {"claims": 0.0, "orders": 1.0, "complies": 1.0}
    assert facts == {
        "claims": {"orders": {}},
        **{name: {"orders": {item: pieces}} for name in ("orders", "complies")},
    }


def test_a_tiny_repository_is_mended_by_the_right_operator_alone(tmp_path):
    """Row 0 of its data, played three times, with the calls of the warm start."""
    subprocess.run([sys.executable, "examples/mending.py", str(tmp_path)], cwd=ROOT, check=True, timeout=60)
    write_tiny_tokenizer(tmp_path / "model")
    given = [f"data.train_files=[{tmp_path}/train.jsonl]", f"model.path={tmp_path}/model"]
    config = load_config(str(ROOT / "examples" / "mending.yaml"), given)
    row = json.loads((tmp_path / "train.jsonl").read_text().splitlines()[0])
    code = row["extra_info"]["environment_kwargs"]["files"]["f.py"]
    right = {"add": "+", "subtract": "-", "multiply": "*"}[row["prompt"][0]["content"].split()[-1]]
    (old,) = set("+-*") & set(code)
    (other,) = set("+-*") - {old, right}
    rewards = []
    for new in (right, other):
        edit = {"name": "edit", "arguments": {"path": "f.py", "old": old, "new": new}}
        turns = [
            {"calls": [{"name": "bash", "arguments": {"command": "cat f.py"}}]},
            {"calls": [edit]},
            "done",
        ]
        (tmp_path / "turns.yaml").write_text(json.dumps(turns))
        played = play_row(config, row=0, model=str(tmp_path / "turns.yaml"), read=lambda: None, say=print)
        rewards.append(played.trajectory.reward)
    assert rewards == [1.0, 0.0]


def test_the_documented_function(documented):
    forecast = documented.tools.get("city_weather")()
    assert forecast.parameters["properties"]["days"]["description"] == "How many days ahead."

    async def main() -> str:
        with pytest.raises(WrongCall, match="no forecast for 'Rome'; cities: Bern, Oslo"):
            await forecast.call({"city": "Rome"})
        return (await forecast.call({"city": "Oslo", "days": 2})).text

    assert trio.run(main) == "[14.0,14.0]"


def test_the_documented_tool(documented):
    tool = documented.tools.get("notebook")({"max_notes": 2})

    async def main() -> list[str]:
        await tool.start(first_note="one")
        return [(await tool.call({"note": note})).text for note in ("two", "three")]

    assert asyncio.run(main()) == ["one\ntwo", "error: the notebook is full"]


def test_the_documented_interaction(documented):
    partner = documented.interactions.get("guess_the_number")()

    async def main() -> list[tuple[str, bool]]:
        await partner.start(number=7)
        replies = [
            await partner.respond([Message("assistant", text)]) for text in ("I say 3", "9", "no idea", "7")
        ]
        return [(reply.text, reply.is_done) for reply in replies]

    assert asyncio.run(main()) == [
        ("Higher.", False),
        ("Lower.", False),
        ("Please answer with a number.", False),
        ("Right.", True),
    ]


def test_the_documented_reward_and_agent(documented):
    task = Task("t", "my_dataset", (Message("user", "2+2?"),), "debate", ground_truth="4")
    reward = documented.rewards.get("exact_answer")()
    reward.check(task)
    attempts = [
        Attempted(task, (*task.messages, Message("assistant", text)), Outcome.COMPLETED, 1, 1, 1, 9)
        for text in ("4", "5")
    ]
    assert [reward.score(attempt).value for attempt in attempts] == [1.0, 0.0]
    assert documented.agents.resolve("debate") == "debate"


def test_the_documented_agent_criticises_itself(documented):
    trajectory = play(["4", "no proof", "5"], agent=documented.agents.get("debate"))
    assert [message.role for message in trajectory.messages] == ["user", "assistant"] * 3
    assert trajectory.metrics["reward/agent"] == 1.0


def test_the_documented_reward_function(tmp_path):
    (function,) = [block for block in code_blocks("docs/rewards.md") if block.startswith("def ")]
    (tmp_path / "mine.py").write_text(function)
    config = RewardConfig(custom_function={"path": str(tmp_path / "mine.py"), "kwargs": {"bonus": 0.1}})
    task = Task("t", "any", (Message("user", "2+2?"),), "a", ground_truth="4")
    attempt = Attempted(task, (*task.messages, Message("assistant", "4")), Outcome.COMPLETED, 1, 1, 1, 9)
    result = RewardTable(config, load_plugins()).own(task).reward.score(attempt)
    assert (result.value, result.metrics["accuracy"], result.details) == (1.1, 1.0, {"pred": "4"})


def test_the_documented_trial_prints_the_answer(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    (trial,) = [block for block in code_blocks("docs/tools.md") if "trio.run(" in block]
    exec(compile(trial, "docs/tools.md", "exec"), {})
    schema, answer = capsys.readouterr().out.splitlines()
    assert "Count the letters of a word." in schema
    assert answer == "10"


def test_the_agent_of_nim_is_shown_as_it_is():
    (shown,) = [block for block in code_blocks("docs/agents.md") if block.startswith("class Nim(")]
    assert shown in (ROOT / "examples" / "nim.py").read_text()


def test_the_documented_planner_lets_workers_speak(tmp_path):
    (method,) = [block for block in code_blocks("docs/agents.md") if block.startswith("async def run")]
    lines = [
        "from typing import ClassVar",
        "from agentrl.plugins import AgentLoop, Session",
        "from agentrl.types import Message, Task",
        "class Planner(AgentLoop):",
        "    name: ClassVar[str] = 'planner'",
        *(f"    {line}" for line in method.splitlines()),
    ]
    (tmp_path / "planner.py").write_text("\n".join(lines))
    turns = ["6*7\n1+1", calculator("6*7"), "42", calculator("1+1"), "2", "42 and 2"]
    trajectory = play(
        turns, agent="planner", plugins=[str(tmp_path / "planner.py")], tools=["calculator"], max_turns=9
    )
    assert trajectory.failure is None
    assert [one.name for one in trajectory.conversations] == ["main", "worker", "worker"]
    assert trajectory.segment_conversations == (0, 1, 2)
    assert [m.content for m in trajectory.messages if m.role == "user"][1:] == ["6*7: 42", "1+1: 2"]


def calculator(expression: str) -> Call:
    return call("calculator", expression=expression)
