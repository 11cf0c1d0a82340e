"""verl's tools and interactions load as they are: with verl's own files, taken from its packages on the
index.

The class and YAML forms are those of verl 0.5.0 (and 0.7.1, whose tools answer with ToolResponse), the
function tools those of 0.9.1.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import trio

from agentrl.adapters.catalog import open_plugins
from agentrl.config.agent import AgentConfig
from agentrl.errors import PluginError, ToolError
from agentrl.extras.verl.importing.tool_files import find_unloadable
from agentrl.plugins import Plugins
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.testing.contracts import InteractionContract, ToolContract
from agentrl.types import Image, Message

# The YAML of verl's GSM8K example with a tool, and the one with an interaction, in the form that its
# documents give.
TOOLS = """
tools:
  - class_name: verl.tools.gsm8k_tool.Gsm8kTool
    config:
      type: native
    tool_schema:
      type: function
      function:
        name: calc_gsm8k_reward
        description: Calculate the reward of a GSM8K answer.
        parameters:
          type: object
          properties:
            answer:
              type: string
              description: The model's answer, only its digits
          required: [answer]
"""
INTERACTIONS = """
interaction:
  - name: checker
    class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction
    config: {}
  - class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction
    config: {}
"""
CLASSES = ("verl/tools/gsm8k_tool.py", "verl/interactions/gsm8k_interaction.py")


def verl_wheel(version: str) -> Path:
    """Return verl's wheel, downloaded once per machine from the index that pip is set to."""
    folder = Path(tempfile.gettempdir()) / f"agentrl-tests-verl-{version}"
    if not list(folder.glob("*.whl")):
        with tempfile.TemporaryDirectory(dir=folder.parent) as fresh:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary",
                ":all:",
                "-d",
                fresh,
                f"verl=={version}",
            ]
            subprocess.run(command, check=True, timeout=120)
            folder.mkdir(exist_ok=True)
            (wheel,) = Path(fresh).glob("*.whl")
            wheel.replace(folder / wheel.name)
    return next(folder.glob("*.whl"))


def extract(version: str, files: tuple[str, ...], folder: Path) -> Path:
    with zipfile.ZipFile(verl_wheel(version)) as wheel:
        for file in files:
            wheel.extract(file, folder)
    return folder


@contextlib.contextmanager
def without_verl(*path: Path) -> Iterator[None]:
    """As in a fresh process with `path` in front of sys.path."""

    def forget() -> None:
        for name in [
            name
            for name in sys.modules
            if name.partition(".")[0] == "verl" or name in ("my_tools", "my_interactions")
        ]:
            del sys.modules[name]

    before = list(sys.path)
    sys.path[:0] = map(str, path)
    forget()
    try:
        yield
    finally:
        forget()
        sys.path[:] = before


@pytest.fixture(params=["ours", "0.5.0", "0.7.1"])
def classes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The two examples by the names that verl gives them: of the shim, and verl's own files on top of it."""
    folders = [] if request.param == "ours" else [extract(request.param, CLASSES, tmp_path / "theirs")]
    with without_verl(*folders):
        yield request.param


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory for modules of the user's."""
    monkeypatch.chdir(tmp_path)
    with without_verl():
        yield tmp_path


def load(folder: Path, **texts: str) -> Plugins:
    """Write the files and load the plugins that they name; keys are those of the config."""
    paths = {}
    for key, text in texts.items():
        path = folder / f"{key}{'.py' if key == 'verl_function_tools' else '.yaml'}"
        path.write_text(textwrap.dedent(text))
        paths[key] = str(path)
    return open_plugins(AgentConfig(**paths))


def run(main) -> None:
    """Run `main(call)`: `await call(function, ...)` awaits it in the event loop of asyncio plugins."""

    async def wrapped() -> None:
        with AsyncioHost() as host:
            await main(host.run)

    trio.run(wrapped)


def started(plugins: Plugins, name: str, key: str = "t", **row_kwargs):
    tool = plugins.tools.get(name)()
    tool.trajectory_key, tool.row_kwargs = key, row_kwargs
    return tool


# ------------------------------------------------------------------------------------------- verl's own files


def test_the_gsm8k_tool(classes, tmp_path):
    plugins = load(tmp_path, verl_tool_config=TOOLS)
    if classes != "ours":
        assert sys.modules["verl.tools.gsm8k_tool"].__file__.startswith(str(tmp_path))
    assert plugins.served_tools == ("calc_gsm8k_reward",)
    schema = plugins.tools.get("calc_gsm8k_reward")().schema()["function"]
    assert (
        schema["parameters"]["properties"]["answer"]["description"] == "The model's answer, only its digits"
    )

    async def main(call) -> None:
        one, other = (
            started(plugins, "calc_gsm8k_reward", "one"),
            started(plugins, "calc_gsm8k_reward", "other"),
        )
        for tool in (one, other):
            await call(lambda tool=tool: tool.start(ground_truth="72"))
        wrong = await call(one.call, {"answer": "71"})
        assert (wrong.text, wrong.reward, wrong.is_error) == (
            "Current parsed answer='71' reward=0.0",
            -0.05,
            False,
        )
        right = await call(one.call, {"answer": "72"})
        assert (right.text, right.reward) == ("Current parsed answer='72' reward=1.0", 0.0)
        assert await call(one.score) == 1.0
        assert await call(other.score) == 0.0
        await call(one.close)
        await call(other.close)
        with pytest.raises(KeyError):  # released
            await call(one.call, {"answer": "72"})

    run(main)


def test_the_gsm8k_interaction(classes, tmp_path):
    plugins = load(tmp_path, verl_interaction_config=INTERACTIONS)
    assert {"checker", "gsm8k"} <= set(plugins.interactions.names())
    cls = plugins.interactions.get("gsm8k")
    assert cls.__name__ == "VerlInteraction_gsm8k", "the user's comes before the built-in one"

    async def main(call) -> None:
        one, other = plugins.interactions.get("checker")(), plugins.interactions.get("checker")()
        for partner in (one, other):
            await call(lambda partner=partner: partner.start(query="?", ground_truth="72"))
        asked = Message("user", "?")
        reply = await call(one.respond, [asked, Message("assistant", "It is 72.")])
        assert (reply.is_done, reply.reward) == (False, 0.0)
        assert "incorrect" in reply.text
        reply = await call(one.respond, [asked, Message("assistant", "#### 72")])
        assert (reply.is_done, reply.reward) == (True, 1.0)
        assert await call(one.score) is None, "its turns were scored"
        assert await call(other.score) == 0.0
        await call(one.finalize)
        await call(other.finalize)

    run(main)


def test_verls_own_tests_of_function_tools_pass_against_the_shim(tmp_path):
    file = "tests/tools/test_function_tool_on_cpu.py"
    extract("0.9.1", (file,), tmp_path)
    (tmp_path / "conftest.py").write_text("from agentrl.extras.verl import shim\nshim.install()\n")
    # Two of them look into verl's trainer.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "not rollout_yaml and not hydra",
        str(tmp_path / file),
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " 2 deselected" in done.stdout
    assert int(done.stdout.split(" passed")[0].split()[-1]) >= 25


def test_verls_stub_tools(tmp_path):
    """Tools of the form of 0.9.1 that override `execute` alone."""
    folder = extract("0.9.1", ("tests/tools/_stub_search_tools.py",), tmp_path / "theirs") / "tests/tools"
    yaml = """
    tools:
      - class_name: _stub_search_tools.StubSearchTool
        config: {type: native, topk: 3}
        tool_schema:
          type: function
          function:
            name: search
            description: Search.
            parameters:
              type: object
              properties:
                query_list: {type: array, items: {type: string}, description: Queries.}
              required: [query_list]
    """
    with without_verl(folder):
        plugins = load(tmp_path, verl_tool_config=yaml)
        tool = started(plugins, "search")
        assert tool.parameters["properties"]["query_list"]["items"] == {"type": "string"}

        async def main(call) -> None:
            await call(lambda: tool.start(ground_truth="x"))
            result = await call(tool.call, {"query_list": ["a", "b"]})
            assert (result.text, result.reward, result.metrics) == (
                "hits-for:a; hits-for:b",
                0.0,
                {"num_queries": 2.0},
            )
            assert await call(tool.score) is None, "it has no reward of its own"
            await call(tool.close)

        run(main)


# ----------------------------------------------------------------------------------------- the life of a tool

RECORDING = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

class Recording(BaseTool):
    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {"name": "record", "description": "Record."}})

    async def create(self, instance_id=None, %(create)s):
        self.seen = [("create", %(seen)s)]
        return instance_id

    async def execute(self, instance_id, parameters, **kwargs):
        self.seen.append(("execute", instance_id, parameters, kwargs))
        return ToolResponse(text="look", image=[b"a picture"]), 0.5, {"status": "fine", "count": 2, "share": float("nan")}

    async def calc_reward(self, instance_id, **kwargs):
        self.seen.append(("calc_reward", instance_id, kwargs))
        return %(reward)s

    async def release(self, instance_id, **kwargs):
        self.seen.append(("release", instance_id, kwargs))
"""  # noqa: E501
RECORDING_YAML = "tools: [{class_name: my_tools.Recording, config: {type: native, depth: 3}}]"


@pytest.mark.parametrize(
    ("create", "seen", "expected"),
    [
        ("a=None", "a", 1),
        ("create_kwargs=None", "create_kwargs", {"a": 1}),
        ("**kwargs", "kwargs", {"a": 1, "create_kwargs": {"a": 1}}),
    ],
)
@pytest.mark.parametrize(("reward", "score"), [("2", 2.0), ("['a', 'list']", None)])
def test_what_a_row_gives_reaches_each_method(module, create, seen, expected, reward, score):
    (module / "my_tools.py").write_text(RECORDING % {"create": create, "seen": seen, "reward": reward})
    plugins = load(module, verl_tool_config=RECORDING_YAML)
    tool = started(
        plugins,
        "record",
        "key",
        execute_kwargs={"b": 2},
        calc_reward_kwargs={"c": 3},
        release_kwargs={"d": 4},
        create_kwargs={"a": 1},
    )
    assert tool.implementation.config == {"type": "native", "depth": 3}

    async def main(call) -> None:
        await call(lambda: tool.start(a=1))
        result = await call(tool.call, {"x": 0})
        assert (result.text, result.reward, result.metrics) == ("look", 0.5, {"count": 2.0})
        assert result.images == (Image(b"a picture"),)
        assert await call(tool.score) == score
        await call(tool.close)

    run(main)
    assert tool.implementation.seen == [
        ("create", expected),
        ("execute", "key", {"x": 0}, {"b": 2}),
        ("calc_reward", "key", {"c": 3}),
        ("release", "key", {"d": 4}),
    ]


def test_a_tool_whose_create_failed_is_neither_scored_nor_released(module):
    (module / "my_tools.py").write_text(RECORDING % {"create": "*, needed", "seen": "needed", "reward": "1"})
    tool = started(load(module, verl_tool_config=RECORDING_YAML), "record")

    async def main(call) -> None:
        with pytest.raises(TypeError, match="needed"):
            await call(tool.start)
        assert await call(tool.score) is None
        await call(tool.close)

    run(main)


def test_an_answer_of_another_form_is_the_tools_fault(module):
    (module / "my_tools.py").write_text("""
from verl.tools.base_tool import BaseTool

class Recording(BaseTool):
    async def execute(self, instance_id, parameters):
        return "text"
""")
    yaml = (
        "tools: [{class_name: my_tools.Recording, tool_schema: {type: function, function: {name: r, "
        "description: R.}}}]"
    )
    tool = started(load(module, verl_tool_config=yaml), "r")

    async def main(call) -> None:
        await call(tool.start)
        with pytest.raises(
            ToolError, match=r"'r' returned str 'text'; verl's tools return \(response, reward, metrics\)"
        ):
            await call(tool.call, {})

    run(main)


# -------------------------------------------------------------------------------------------------- functions

FUNCTIONS = '''
from verl.tools.function_tool import function_tool

@function_tool("get_weather")
async def weather(city: str, days: list[int] | None = None):
    """Get the weather.

    Args:
        city: The city to look up.
        days: Which days.
    """
    return {"city": city, "t": 17.3}, None, {"calls": 1}

@function_tool
def shout(text: str) -> str:
    """Shout.

    Args:
        text: What to shout.
    """
    return text.upper()
'''


def test_function_tools(module):
    plugins = load(module, verl_function_tools=FUNCTIONS)
    assert plugins.served_tools == ("get_weather", "shout")
    schema = plugins.tools.get("get_weather")().schema()["function"]
    assert schema["description"] == "Get the weather."
    assert schema["parameters"]["required"] == ["city"]
    assert schema["parameters"]["properties"]["city"] == {
        "type": "string",
        "description": "The city to look up.",
    }
    assert "integer" in str(schema["parameters"]["properties"]["days"]), "nested schemas stay whole"

    async def main(call) -> None:
        result = await call(started(plugins, "get_weather").call, {"city": "Bonn"})
        assert (result.text, result.reward, result.metrics) == (
            '{"city": "Bonn", "t": 17.3}',
            0.0,
            {"calls": 1.0},
        )
        assert (await call(started(plugins, "shout").call, {"text": "a"})).text == "A"

    run(main)


# -------------------------------------------------------------------------------------------------- contracts


def loaded(kind: str, name: str, **texts: str):
    """Return one class of verl's in our form, for the contract suites."""
    with without_verl(), tempfile.TemporaryDirectory() as folder:
        return getattr(load(Path(folder), **texts), kind).get(name)


class TestVerlTool(ToolContract):
    tool = loaded("tools", "calc_gsm8k_reward", verl_tool_config=TOOLS)
    valid_calls = ({"answer": "71"}, {"answer": "72"})
    create_kwargs: ClassVar = {"ground_truth": "72"}


class TestVerlFunctionTool(ToolContract):
    tool = loaded("tools", "get_weather", verl_function_tools=FUNCTIONS)
    valid_calls = ({"city": "Bonn"}, {"city": "Bonn", "days": [1, 2]})


class TestVerlInteraction(InteractionContract):
    interaction = loaded("interactions", "checker", verl_interaction_config=INTERACTIONS)
    says = ("#### 71", "#### 72")
    interaction_kwargs: ClassVar = {"ground_truth": "72"}


# ----------------------------------------------------------------------------------------------- interactions


def test_an_interaction_that_scores_only_its_end(module):
    (module / "my_interactions.py").write_text("""
from verl.interactions.base import BaseInteraction

class Talk(BaseInteraction):
    async def start_interaction(self, instance_id, **kwargs):
        self.started = kwargs
        return instance_id
    async def generate_response(self, instance_id, messages, **kwargs):
        return len(messages) > 2, f"{messages[-1]['role']}: {messages[-1]['content']}", 0.0, {"words": 3, "mood": "good"}
    async def calculate_score(self):
        return 0.75
    async def finalize_interaction(self):
        self.finalized = True
""")  # noqa: E501
    plugins = load(module, verl_interaction_config="interaction: [{class_name: my_interactions.Talk}]")
    partner = plugins.interactions.get("talk")()

    async def main(call) -> None:
        await call(lambda: partner.start(topic="x"))
        reply = await call(partner.respond, [Message("user", "?"), Message("assistant", "hi")])
        assert (reply.text, reply.is_done, reply.reward, reply.metrics) == (
            "assistant: hi",
            False,
            0.0,
            {"words": 3.0},
        )
        assert await call(partner.score) == 0.75
        await call(partner.finalize)

    run(main)
    assert partner.implementation.started == {"name": "talk", "topic": "x"}
    assert partner.implementation.config == {"name": "talk"}
    assert partner.implementation.finalized


# ----------------------------------------------------------------------------------------------------- errors

MORE_OF_VERL = r"it needs more of verl: install verl, or start in the root of a checkout of verl"


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("verl_tool_config", "tools: {}", "the key 'tools' with a list is missing"),
        ("verl_tool_config", "tools: [{config: {}}]", r"tools\[0\] has no class_name"),
        ("verl_tool_config", "tools: [", "verl_tool_config.yaml"),
        (
            "verl_tool_config",
            "tools: [{class_name: no.such.Tool}]",
            "class_name 'no.such.Tool': ModuleNotFoundError: No module named 'no'",
        ),
        ("verl_tool_config", "tools: [{class_name: Tool}]", "class_name 'Tool': ValueError"),
        (
            "verl_tool_config",
            "tools: [{class_name: verl.tools.search_tool.SearchTool}]",
            f"'verl.tools.search_tool'; {MORE_OF_VERL}",
        ),
        (
            "verl_tool_config",
            "tools: [{class_name: my_search.Search}]",
            f"'verl.tools.utils'; {MORE_OF_VERL}",
        ),
        (
            "verl_tool_config",
            "tools: [{class_name: my_names.Names}]",
            f"cannot import name 'ToolRegistry'.*; {MORE_OF_VERL}",
        ),
        (
            "verl_function_tools",
            "import verl.utils.rollout_skip",
            f"'verl.utils.rollout_skip'; {MORE_OF_VERL}",
        ),
        (
            "verl_interaction_config",
            "interaction: [{class_name: verl.interactions.weather_interaction.WeatherInteraction}]",
            f"'verl.interactions.weather_interaction'; {MORE_OF_VERL}",
        ),
        (
            "verl_tool_config",
            "tools: [{class_name: verl.tools.base_tool.BaseTool, config: {type: mcp}}]",
            "Name MCP servers in agent.mcp_servers",
        ),
        (
            "verl_tool_config",
            "tools: [{class_name: verl.tools.base_tool.BaseTool}]",
            "BaseTool has no tool schema",
        ),
        (
            "verl_tool_config",
            "tools: [{class_name: a.B, tool_schema: {type: function}}]",
            "tool_schema of a.B: .*function Field required",
        ),
        ("verl_function_tools", "x = 1", "the file has no function decorated with @function_tool"),
        ("verl_function_tools", "raise OSError('no disk')", "OSError: no disk"),
        (
            "verl_interaction_config",
            "interaction: [{class_name: verl.interactions.base.Nope}]",
            "AttributeError.*'Nope'",
        ),
        (
            "verl_interaction_config",
            "interaction: [{class_name: &base verl.interactions.base.BaseInteraction, name: a}, {class_name: "
            "*base, name: a}]",
            "two interactions are named 'a'",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(module, key, text, message):
    (module / "my_search.py").write_text(
        "from verl.tools.utils.search_r1_like_utils import perform_single_search_batch\n"
    )
    (module / "my_names.py").write_text("from verl.tools.base_tool import ToolRegistry\n")
    with pytest.raises(PluginError, match=message) as raised:
        load(module, **{key: text})
    assert "\n" not in str(raised.value)
    assert f"agent.{key}=" in str(raised.value)


def test_a_missing_file(module):
    with pytest.raises(PluginError, match=r"agent.verl_tool_config='no.yaml': the file does not exist"):
        open_plugins(AgentConfig(verl_tool_config="no.yaml"))
    with pytest.raises(PluginError, match=r"agent.verl_function_tools='no.py'.*does not exist"):
        open_plugins(AgentConfig(verl_function_tools="no.py"))


def test_nothing_of_verl_is_imported_unless_asked_for(module):
    open_plugins(AgentConfig())
    assert "verl" not in sys.modules


def test_an_installed_verl_is_left_alone(tmp_path):
    package = tmp_path / "verl"
    package.mkdir()
    (package / "__init__.py").write_text("IS_REAL = True")
    with without_verl(tmp_path):
        with pytest.raises(PluginError, match="of the installed verl fails to import: ModuleNotFoundError"):
            load(tmp_path, verl_tool_config="tools: [{class_name: verl.tools.base_tool.BaseTool}]")
        assert sys.modules["verl"].IS_REAL


def test_a_checkout_of_verl_that_cannot_be_imported_lends_its_tools(module):
    """As in a clone of verl without the packages that it needs: the rest comes from the stand-ins."""
    imports = "from verl.tools.base_tool import BaseTool\nfrom verl.utils.more.deep import NAME\n"
    files = {
        "verl/__init__.py": "import a_package_that_is_not_here\n",
        "verl/utils/__init__.py": "from . import another_one\n",
        "verl/utils/more/__init__.py": "",
        "verl/utils/more/deep.py": "NAME = 'deep'\n",
        "verl/tools/__init__.py": "",
        "verl/tools/base_tool.py": "import a_package_that_is_not_here\n",
        "verl/tools/own.py": imports + "class Own(BaseTool):\n    found = NAME\n",
        "verl/tools/far.py": imports + "import a_package_that_is_not_here\nclass Far(BaseTool): pass\n",
    }
    for name, text in files.items():
        (module / name).parent.mkdir(parents=True, exist_ok=True)
        (module / name).write_text(text)
    tool = SCHEMA_OF_OWN.replace("CLASS", "verl.tools.own.Own")
    (module / "tools.yaml").write_text(tool)
    assert find_unloadable("tools.yaml") == []
    assert load(module, verl_tool_config=tool).tools.get("own").implementation.found == "deep"
    (module / "tools.yaml").write_text(SCHEMA_OF_OWN.replace("CLASS", "verl.tools.far.Far"))
    assert find_unloadable("tools.yaml") == [
        "verl.tools.far.Far needs a_package_that_is_not_here, which is not here"
    ]
    (module / "tools.yaml").write_text(SCHEMA_OF_OWN.replace("CLASS", "verl.tools.search_tool.SearchTool"))
    [why] = find_unloadable("tools.yaml")
    assert "needs verl.tools.search_tool" in why


SCHEMA_OF_OWN = """
tools:
  - class_name: CLASS
    config: {type: native}
    tool_schema:
      {type: function, function: {name: own, description: d, parameters: {type: object, properties: {}}}}
"""
