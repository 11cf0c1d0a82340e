"""How plugins are found: by entry point, by reference, by file, and on a machine that has none of the user's
files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from agentrl.cluster.user_files import rank_files, shipped, user_files
from agentrl.config.agent import AgentConfig
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.data import DataConfig
from agentrl.config.model import ModelConfig
from agentrl.config.reward import RewardConfig
from agentrl.config.schema import Config
from agentrl.data.checked_dataset import OfferedTools
from agentrl.errors import PluginError
from agentrl.plugins import Reference, Tool, import_source, load_plugins, locate
from agentrl.plugins.sources import SHIPPED_PACKAGE, pack_files
from parts.scripted import play
from parts.trajectories import make_task

TOOL_FILE = '''
from agentrl.plugins import Tool, ToolResult

class Shout(Tool):
    name = "shout"
    description = "Say it loudly."
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}

    async def call(self, arguments):
        return ToolResult(arguments["text"].upper() + self.config.get("end", "!"))

def whisper(text: str) -> str:
    """Say it quietly.

    Args:
        text: what to say
    """
    return text.lower()

NUMBER = 7
'''


@pytest.fixture
def tool_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my_tools.py"
    path.write_text(TOOL_FILE)
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("calculator", None),
        ("my_tools.py:Shout", Reference("my_tools.py", "Shout")),
        ("/a b/my_tools.py:shout", Reference("/a b/my_tools.py", "shout")),
        ("package.module:Shout", Reference("package.module", "Shout")),
        (":Shout", None),
        ("package.module:", None),
        ("name:with-dash", None),
    ],
)
def test_what_counts_as_a_reference(text, expected) -> None:
    assert Reference.parse(text) == expected


def test_every_entry_point_loads_and_has_the_name_it_is_registered_by() -> None:
    plugins = load_plugins()
    for registry, group in [
        (plugins.agents, "agentrl.agents"),
        (plugins.tools, "agentrl.tools"),
        (plugins.interactions, "agentrl.interactions"),
        (plugins.environments, "agentrl.environments"),
        (plugins.rewards, "agentrl.rewards"),
    ]:
        for entry in entry_points(group=group):
            assert registry.get(entry.name).name == entry.name
            assert entry.value in registry.source(entry.name)


@pytest.mark.parametrize("form", ["my_tools.py:Shout", "{absolute}:Shout"])
def test_a_class_named_by_its_file_is_offered_by_its_own_name(tool_file, form) -> None:
    named = form.format(absolute=tool_file)
    plugins = load_plugins()
    offered = OfferedTools(AgentConfig(tools=(named, "shout", "calculator")), plugins).schemas(
        make_task(agent_name="tool_agent")
    )
    assert [schema["function"]["name"] for schema in offered] == ["shout", "calculator"]
    assert plugins.tools.get(named) is plugins.tools.get("shout")
    assert plugins.tools.source("shout") == str(tool_file)
    assert plugins.tools.create(named, {"shout": {"end": "?"}}).config == {"end": "?"}


def test_a_module_reference_needs_no_file() -> None:
    plugins = load_plugins()
    assert plugins.tools.own_name("agentrl.tools.calculator:Calculator") == "calculator"
    assert plugins.agents.get("agentrl.agents.tool_agent:ToolAgent") is plugins.agents.get("tool")


def test_a_typed_function_becomes_a_tool(tool_file) -> None:
    tools = load_plugins().tools
    cls = tools.get("my_tools.py:whisper")
    assert issubclass(cls, Tool)
    assert tools.own_name("my_tools.py:whisper") == "whisper"
    assert list(cls().schema()["function"]["parameters"]["properties"]) == ["text"]


@pytest.mark.parametrize(
    ("kind", "name", "problem"),
    [
        ("tools", "shuot", "unknown tool 'shuot'; registered: "),
        ("tools", "nowhere.py:Shout", "plugin file 'nowhere.py' does not exist"),
        ("tools", "my_tools.py:Absent", "my_tools.py has no 'Absent'"),
        (
            "tools",
            "my_tools.py:NUMBER",
            "my_tools.py:NUMBER is not a tool: it must be a subclass of agentrl.plugins.Tool or a typed "
            "function",
        ),
        (
            "agents",
            "my_tools.py:Shout",
            "my_tools.py:Shout is not an agent: it must be a subclass of agentrl.plugins.AgentLoop",
        ),
        (
            "tools",
            "folder:Shout",
            "plugin source 'folder' is a folder; name its files, such as 'folder/a.py'",
        ),
        ("tools", "./folder:Shout", "plugin source './folder' is a folder; name its files, such as"),
        ("tools", "folder/b.py:Shout", "plugin file 'folder/b.py' is a folder; name its files"),
        ("rewards", "no.such.package:X", "No module named 'no'"),
    ],
)
def test_wrong_names_say_what_would_be_right(tool_file, kind, name, problem) -> None:
    (tool_file.parent / "folder" / "b.py").mkdir(parents=True)
    (tool_file.parent / "folder" / "a.py").touch()
    with pytest.raises(PluginError) as caught:
        getattr(load_plugins(), kind).get(name)
    assert problem in str(caught.value)


def test_a_file_that_fails_to_import_can_be_mended(tool_file) -> None:
    tool_file.write_text("1 / 0")
    with pytest.raises(PluginError, match=r"'my_tools.py' fails to import: ZeroDivisionError"):
        import_source("my_tools.py")
    tool_file.write_text("VALUE = 5")
    assert import_source("my_tools.py").VALUE == 5
    assert import_source(str(tool_file)) is import_source("./my_tools.py")


def test_all_files_that_a_config_names_are_shipped() -> None:
    config = Config(
        data=DataConfig(reader="readers/mine.py:read"),
        agent=AgentConfig(
            plugins=("a.py", "package.module"),
            tools=("b.py:Tool", "calculator", "package.module:Tool"),
            default="c.py:Agent",
        ),
        reward=RewardConfig(
            sources={"x": "d.py:Score", "y": "gsm8k"},
            custom_function={"path": "a.py"},
            terms={"t": {"reward": "e.py:T"}},
        ),
        algorithm=AlgorithmConfig(policy_loss="f.py:loss"),
    )
    assert user_files(config) == ["a.py", "b.py", "c.py", "readers/mine.py", "d.py", "e.py", "f.py"]


def test_ranks_alone_get_what_they_read() -> None:
    """A replay may stand where the agents' files are gone."""
    files = {"model": {"external_lib": "own_model.py", "chat_template": "own.jinja"}}
    alone = ModelConfig(**files["model"])
    assert rank_files({"model": alone}) == ["own_model.py", "own.jinja"]
    run = Config.model_validate(
        {**files, "agent": {"plugins": ["a.py"]}, "algorithm": {"policy_loss": "f.py:loss"}}
    )
    ranks = rank_files(run.models, policy_loss=run.algorithm.policy_loss)
    assert ranks == ["f.py", "own_model.py", "own.jinja"]
    assert set(user_files(run)) == {"a.py", *ranks}


def test_no_files_no_runtime_environment() -> None:
    with shipped([]) as runtime_env:
        assert runtime_env is None


def test_a_missing_file_is_the_users_error(tmp_path) -> None:
    with pytest.raises(PluginError, match="does not exist"):
        pack_files([str(tmp_path / "absent.py")], tmp_path)


ELSEWHERE = """
import asyncio, json, sys
from agentrl.plugins import load_plugins, locate
plugins = load_plugins(["./my_tools.py"])
cls = plugins.tools.get("my_tools.py:Shout")
print(json.dumps([asyncio.run(cls().call({"text": "hi"})).text, cls.__module__, str(locate("my_tools.py"))]))
"""


def test_a_worker_in_another_folder_without_the_file_reads_the_shipped_copy(tool_file, tmp_path) -> None:
    """As on another node: the driver's file is gone, the working directory is another, and holds another file
    of that name.
    """
    packed = tmp_path / "packed"
    assert pack_files(["my_tools.py"], packed) == packed / SHIPPED_PACKAGE
    name_at_driver = load_plugins().tools.get("my_tools.py:Shout").__module__
    tool_file.unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "my_tools.py").write_text("raise RuntimeError('a file that has only the same name')")
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE],
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(packed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    text, module, path = json.loads(done.stdout)
    assert (text, module) == ("HI!", name_at_driver)
    assert Path(path).parent == packed / SHIPPED_PACKAGE


def test_without_shipping_a_path_is_itself(tool_file) -> None:
    assert locate("my_tools.py") == Path("my_tools.py")


SCORE_FILE = """
def score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    return {"score": float(ground_truth in solution_str) + bonus, "length": len(solution_str)}
"""


def test_a_function_scores_where_a_reward_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_reward.py").write_text(SCORE_FILE)
    trajectory = play(
        ["Paris"],
        agent="single_turn_agent",
        reward="my_reward.py:score",
        ground_truth="Paris",
        reward_config={"reward_config": {"score": {"bonus": 0.5}}},
    )
    assert [(event.name, event.value) for event in trajectory.rewards] == [("score", 1.5)]
    assert user_files(Config(reward=RewardConfig(sources={"x": "my_reward.py:score"}))) == ["my_reward.py"]
