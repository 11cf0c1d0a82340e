"""What is wrong with a user's plugins, rows and folders ends `agentrl train` before Ray starts, in one line
with the place and the cure.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray
import torch
import yaml
from click.testing import Result
from transformers import AutoModelForCausalLM, Qwen2Config
from typer.testing import CliRunner

from agentrl.adapters.catalog import agent_plugins
from agentrl.chat.chat import Chat
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.cli.app import app
from agentrl.config.agent import AgentConfig
from agentrl.config.schema import Config
from agentrl.controller.train import train
from agentrl.errors import ConfigError, PluginError, UserError
from parts.core_world import PLUGINS, SOURCE
from parts.played_server import played_sglang

CONFIG = {
    "data": {"train_files": ["rows.jsonl"]},
    "model": {"path": "model"},
    "reward": {"sources": {SOURCE: f"{PLUGINS}:Number"}},
    "rollout": played_sglang(),
    "trainer": {"run_dir": "run", "steps": 1},
}
ROW = {
    "data_source": SOURCE,
    "prompt": [{"role": "user", "content": "1+1"}],
    "reward_model": {"ground_truth": "2"},
}
TOOL = """
from agentrl.plugins import Tool, ToolResult

class Shout(Tool):
    name = "shout"
    description = "Say it loudly."
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}}
    async def call(self, arguments):
        return ToolResult("hi")
"""
INTERACTION = """
from agentrl.plugins import Interaction, InteractionReply

class Customer(Interaction):
    name = "customer"
    async def start(self, wish):
        self.wish = wish
    async def respond(self, messages):
        return InteractionReply("hi", is_done=True)
"""
AGENT = """
from agentrl.plugins import AgentLoop

class Loop(AgentLoop):
    name = "loop"
    async def run(self, task, session):
        await session.generate()
"""
REWARD = """
from agentrl.plugins import Reward, RewardResult

class Brevity(Reward):
    name = "brevity"
    def score(self, attempt):
        return RewardResult(1.0)
"""
USE_TOOL = ("agent.tools=['mine.py:Shout']", "agent.default=tool_agent")
USE_AGENT = ("agent.default='mine.py:Loop'",)
USE_REWARD = ("reward.sources={sums: 'mine.py:Brevity'}",)
USE_FILE = ("agent.plugins=[mine.py]",)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, of which `wide` has other sizes."""
    folder = tmp_path_factory.mktemp("models")
    for name, hidden in {"model": 16, "wide": 32}.items():
        write_tiny_tokenizer(folder / name)
        torch.manual_seed(0)
        sizes = {
            "hidden_size": hidden,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        }
        config = Qwen2Config(
            vocab_size=Chat.load(str(folder / name)).vocab_size, max_position_embeddings=512, **sizes
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    return folder


@pytest.fixture(autouse=True)
def here(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "wide"):
        (tmp_path / name).symlink_to(models / name)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    write(ROW)


def write(*rows: dict, file: str = "rows.jsonl") -> None:
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))


def refused(*overrides: str) -> str:
    """Train with these keys, which ends before anything is started; return the error's line."""
    values = yaml.safe_load(Path("config.yaml").read_text())
    for key, _, value in (override.partition("=") for override in overrides):
        *sections, name = key.split(".")
        section = values
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = yaml.safe_load(value)
    with pytest.raises(UserError) as caught:
        train(Config.model_validate(values))
    assert not ray.is_initialized()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def command(*arguments: str) -> Result:
    """Run `agentrl ARGUMENTS`."""
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize(
    ("overrides", "text", "wrong", "right", "words"),
    [
        (USE_REWARD, REWARD, 'name = "brevity"', "", "reward class Brevity (mine.py:4) has no `name`: write "
        "`name = \"brevity\"` in the c"),
        (USE_FILE, REWARD, 'name = "brevity"', "name = 7", "agent.plugins: reward class Brevity (mine.py:4) "
        "has name = 7: write `name"),
        (USE_FILE, TOOL, '"shout"', '"say it"', "tool 'say it' (mine.py:4): a tool's name has 1 to 64 "
        "letters"),
        (USE_TOOL, TOOL, "parameters =", "schema_of =", "agent.tools: tool 'shout' (mine.py:4) has no "
        "`parameters`: write the JSON schema"),
        (USE_TOOL, TOOL, "parameters = {", "parameters = 7, {", "`parameters"),
        (USE_TOOL, TOOL, '"type": "object", ', "", "`parameters` has type None: a call passes one object, so "
        "write \"type\": \"object\""),
        (USE_TOOL, TOOL, "description =", "descripton =", "tool 'shout' (mine.py:4) has no `description`"),
        (USE_TOOL, TOOL, "async def call", "def call", "tool 'shout' (mine.py:8): `call` is not async: write "
        "`async def call`"),
        (USE_TOOL, TOOL, "return ToolResult", "yield ToolResult", "`call` is a generator; return the result "
        "instead of yielding it"),
        (USE_TOOL, TOOL, "def call", "def cal", "tool 'shout' (mine.py:4) does not define `async def "
        "call(self, arguments)`"),
        (USE_FILE, TOOL, "def call", "def cal", "agent.plugins: tool 'shout' (mine.py:4) does not define "
        "`async def call(self, arguments)"),
        (USE_TOOL, TOOL, "self, arguments", "self, text, times", "`call(self, text, times)` is called with "
        "arguments: write `async def ca"),
        (USE_TOOL, TOOL, "self, arguments", "self, text", "tool 'shout' (mine.py:8): `call(self, text)` is "
        "called with arguments: write `async def call(self, arguments)`"),
        (USE_AGENT, AGENT, "task, session", "session, task", "`run(self, session, task)` is called with "
        "task, session: write `async def run(self, task, session)`"),
        (USE_FILE, "import os\nX = os.environ['MY_KEY']\n", "", "", "agent.plugins: plugin source 'mine.py' "
        "fails to import: KeyError: 'MY_KEY' (mine.py:2)"),
        (USE_TOOL, TOOL, "    async", "    runtime = 'thread'\n    async", "runtime = 'thread' must be one "
        "of asyncio, trio"),
        (USE_TOOL, TOOL, "    async", "    def __init__(self, config, url): ...\n    async", "it is "
        "constructed as Shout(config): write"),
        (USE_TOOL, TOOL, "    async", "    def __init__(self, config): config['url']\n    async", "tool "
        "'shout' (mine.py:4) cannot be con"),
        (USE_TOOL, TOOL, "(Tool)", "", "agent.tools: mine.py:Shout is not a tool: it must be a subclass of "
        "agentrl.plugins.Tool"),
        (USE_TOOL, TOOL, "import Tool, ", "import Reward as Tool, ", "agent.tools: mine.py:Shout is not a "
        "tool"),
        (USE_TOOL, TOOL + "Shout = Shout()\n", "", "", "agent.tools: mine.py:Shout is an instance; use its "
        "class, Shout"),
        ((*USE_FILE, "agent.tools=[shout]"), TOOL, "(Tool)", "", "agent.plugins: 'mine.py' defines no plugin "
        "(Tool, ToolResult, Shout): a"),
        ((*USE_FILE, "agent.tools=[shout]"), TOOL.replace("(Tool)", "") + REWARD, "", "", "unknown tool "
        "'shout'; class Shout (mine.py:4)"),
        ((*USE_FILE, "agent.tools=[f]"), "def f(x: int): ...\n", "", "", "f (mine.py:1) is not a tool "
        "without the decorator @tool"),
        (USE_FILE, "import os\n", "", "", "agent.plugins: 'mine.py' defines no plugin: a plugin is a "
        "subclass of"),
        (USE_FILE, TOOL + TOOL.replace("Shout", "Loud"), "", "", "agent.plugins: two tools have the name "
        "'shout': mine.py:4 and mine.py:1"),
        (USE_FILE, INTERACTION, "async def respond", "def respond", "interaction 'customer' (mine.py:8): "
        "`respond` is not async"),
        (USE_FILE, INTERACTION, "respond(self, messages)", "respond(self)", "`respond(self)` is called with "
        "messages: write `async def re"),
        (USE_FILE, INTERACTION, "def respond", "def answer", "interaction 'customer' (mine.py:4) does not "
        "define `async def respond(self,"),
        (USE_AGENT, AGENT.replace("await ", ""), "async def run", "def run", "agent.default: agent 'loop' "
        "(mine.py:6): `run` is not async"),
        (USE_AGENT, AGENT, "task, session", "session", "`run(self, session)` is called with task, session: "
        "write `async def run(self, tas"),
        (USE_AGENT, AGENT, "    async", "    required_tools = 'calculator'\n    async",
        "required_tools='calculator' must be a tuple of n"),
        (USE_AGENT, AGENT, "    async", "    required_tools = ('x',)\n    uses_tools = False\n    async",
        "it requires x, but has uses_to"),
        (USE_AGENT, AGENT, "    async", "    required_tools = ('calculator',)\n    async", "needs the tool "
        "'calculator', but rows:0 is of"),
        (USE_AGENT, AGENT, "    async", "    needs_interaction = True\n    async", "agent loop needs "
        "extra_info.interaction_kwargs with a"),
        (USE_AGENT, AGENT, "    async", "    async def prompt(self, task, tools): ...\n    async", "`prompt` "
        "is async but never awaited"),
        (USE_AGENT, AGENT, "    async", "    def prompt(self, task, tools): return task.extra_info['q']\n    "
        "async", "raised in `prom"),
        (USE_AGENT, AGENT, "    async", "    def prompt(self, task, tools): return 'hi'\n    async",
        "`prompt` returned ['h', 'i']; retur"),
        (USE_REWARD, REWARD, "def score", "async def score", "reward.sources.sums: reward 'brevity' "
        "(mine.py:4): `score` is async,"),
        (USE_REWARD, REWARD, "    def", "    runs_in = 'asyncio'\n    def", "`score` is not async, but "
        "runs_in = 'asyncio' awaits it"),
        (USE_REWARD, REWARD, "    def", "    runs_in = 'gpu'\n    def", "runs_in = 'gpu' must be one of "
        "inline, thread, process, asyncio,"),
        (USE_REWARD, REWARD, "self, attempt", "self, task, attempt", "`score(self, task, attempt)` is called "
        "with attempt"),
        (USE_REWARD, REWARD, "    def", "    def check(self, task): raise KeyError('q')\n    def",
        "rows.jsonl: row 0 (line 1): reward 'b"),
        (("reward.terms={brief: {reward: 'mine.py:Brevity'}}",), REWARD, "score", "scor",
        "reward.terms.brief: reward 'brevity' (mine.py:"),
    ],
)  # fmt: skip
def test_a_malformed_plugin(overrides, text, wrong, right, words):
    assert wrong in text
    Path("mine.py").write_text(text.replace(wrong, right, 1))
    assert words in refused(*overrides)


@pytest.mark.parametrize("scope", ["TurnReward", "GroupReward", "BatchReward"])
def test_rewards_of_every_scope_are_checked(scope):
    Path("mine.py").write_text(
        REWARD.replace("Reward,", f"{scope},")
        .replace("(Reward)", f"({scope})")
        .replace("def score", "def scores")
    )
    assert "reward 'brevity' (mine.py:4) does not define `def score(self, attempt)`" in refused(*USE_REWARD)


def test_a_base_class_needs_neither_name_nor_methods():
    Path("mine.py").write_text(
        TOOL.replace('name = "shout"', "").replace("class Shout(Tool)", "class Base(Tool)")
        + "class Shout(Base):\n    name = 'shout'\n"
    )
    plugins = agent_plugins(AgentConfig(plugins=("mine.py",)))
    assert "shout" in plugins.tools.names()
    assert plugins.tools.get("shout").name == "shout"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("agent.tool_limits={calculater: {timeout_s: 3}}", "agent.tool_limits.calculater: unknown tool "
        "'calculater' (did you mean 'calculator'?); registered: calc"),
        ("agent.tool_config={calculater: {}}", "agent.tool_config.calculater: unknown tool"),
        ("agent.tool_config={'mine.py:Shout': {}}", "settings must be under the tool's own name: write "
        "agent.tool_config.sh"),
        ("agent.interaction_config={scriptd: {}}", "agent.interaction_config.scriptd: unknown interaction "
        "'scriptd' (did you mean 'scripted'?); registered: "),
        ("agent.agent_config={tool: {}}", "settings must be under the agent's own name: write "
        "agent.agent_config.tool_agent"),
        ("reward.reward_config={gsm9k: {}}", "reward.reward_config.gsm9k: unknown reward 'gsm9k'"),
        ("agent.plugins=[mine.pi]", "agent.plugins: plugin source 'mine.pi' fails to import"),
        ("agent.plugins=[mime.py]", "agent.plugins: plugin file 'mime.py' does not exist; did you mean "
        "'mine.py'?"),
        ("agent.tools=['mime.py:Shout']", "agent.tools: plugin file 'mime.py' does not exist"),
        ("agent.tools=['mine.py:Shot']", "agent.tools: mine.py has no 'Shot'; did you mean 'Shout'?"),
        ("agent.default='mime.py:Loop'", "agent.default: plugin file 'mime.py' does not exist"),
        ("eval.tools=['mime.py:Shout']", "eval.tools: plugin file 'mime.py' does not exist"),
        ("eval.rewards={a: 'mime.py:Score'}", "eval.rewards.a: plugin file 'mime.py' does not exist"),
        ("reward.sources={a: 'mime.py:score'}", "reward.sources.a: plugin file 'mime.py' does not exist"),
        ("reward.terms={t: {reward: 'mime.py:Score'}}", "reward.terms.t: plugin file 'mime.py' does not "
        "exist"),
        ("reward.custom_function.path=mime.py", "reward.custom_function.path: plugin file 'mime.py' does "
        "not exist"),
        ("data.reader='mime.py:read'", "data.reader='mime.py:read': plugin file 'mime.py' does not exist"),
        ("algorithm.policy_loss='mime.py:loss'", "algorithm.policy_loss: plugin file 'mime.py' does not "
        "exist"),
        ("algorithm.advantage='mime.py:loss'", "algorithm.advantage: plugin file 'mime.py' does not exist"),
        ("model.external_lib=mime.py", "model.external_lib: file 'mime.py' does not exist; did you mean "
        "'mine.py'?"),
        ("model.chat_template=mime.jinja", "mime.jinja"),
        ("agent.verl_tool_config=mime.yaml", "agent.verl_tool_config"),
        ("agent.verl_function_tools=mime.py", "agent.verl_function_tools"),
        ("agent.verl_interaction_config=mime.yaml", "agent.verl_interaction_config"),
    ],
)  # fmt: skip
def test_a_wrong_name_says_its_key(override, words):
    Path("mine.py").write_text(TOOL)
    assert words in refused(override)


def test_two_files_with_the_same_names():
    for name in ("mine.py", "yours.py"):
        Path(name).write_text(TOOL)
    words = "two tools have the name 'shout': mine.py:4 and yours.py:4; rename one of them"
    assert words in refused("agent.plugins=[mine.py, yours.py]")
    assert words in refused("agent.tools=['mine.py:Shout', 'yours.py:Shout']")
    with pytest.raises(PluginError, match="two tools have the name 'shout'"):
        agent_plugins(AgentConfig(plugins=("mine.py", "yours.py")))
    agent_plugins(AgentConfig(plugins=("mine.py", "./mine.py")))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("def compute_score(answer, truth): ...", "function 'compute_score' (mine.py:1) is called as "
        "compute_score(data_source, solution_"),
        ("def compute_score(data_source, solution_str, ground_truth, extra_info, bonus): ...", "missing a "
        "required argument: 'bonus'"),
        ("def compute_score(**_):\n    yield 1", "`compute_score` is a generator"),
    ],
)  # fmt: skip
def test_a_custom_function_that_cannot_be_called(function, words):
    Path("mine.py").write_text(function + "\n")
    assert words in refused("reward.custom_function.path=mine.py")
    assert words in refused("reward.sources={sums: 'mine.py:compute_score'}")


@pytest.mark.parametrize(
    ("extra_info", "overrides", "words"),
    [
        ({"tools_kwargs": {"shout": {"create_kwargs": {"volume": 3, "x": 1}}}}, USE_TOOL, "gets an "
        "unexpected keyword argument 'x'; the r"),
        ({"tools_kwargs": {"shout": {"create_kwargs": {}}}}, USE_TOOL,
        "extra_info.tools_kwargs.shout.create_kwargs passes nothing"),
        ({}, USE_TOOL, "tool 'shout' (mine.py:10): `start(*, volume)` lacks a required argument: 'volume'; "
        "the row's extra_info.tools_kwa"),
        ({"tools_kwargs": {"mine.py:Shout": {"create_kwargs": {"volume": 3}}}}, ("agent.default=tool_agent",),
        "lacks a required argument"),
        ({"tools_kwargs": {"mine.py:Quiet": {"create_kwargs": {"volume": 3}}}}, USE_FILE, "'mine.py:Quiet' "
        "has the name 'quiet' and gets"),
        ({"interaction_kwargs": {"name": "customer", "wihs": "cheese"}}, USE_FILE, "interaction 'customer' "
        "(mine.py:28): `start(wish)`"),
        ({"interaction_kwargs": {"name": "customer"}}, USE_FILE, "lacks a required argument: 'wish'; the "
        "row's extra_info.interaction_kwa"),
        ({"interaction_kwargs": {"name": "custumer"}}, USE_FILE, "unknown interaction 'custumer'"),
        ({"tool_selection": ["calculator"]}, USE_TOOL, "tool_selection: 'calculator' is not offered; "
        "offered: mine.py:Shout"),
    ],
)  # fmt: skip
def test_what_a_row_passes_is_what_start_takes(extra_info, overrides, words):
    tool = TOOL + "    async def start(self, *, volume):\n        self.volume = volume\n"
    quiet = TOOL.replace("Shout", "Quiet").replace("shout", "quiet")
    Path("mine.py").write_text(f"{tool}\n{quiet}\n{INTERACTION}")
    write(ROW if overrides is not USE_TOOL else {**ROW,
    "extra_info": {"tools_kwargs": {"shout": {"create_kwargs": {"volume": 1}}}}},
          {**ROW, "extra_info": extra_info})  # fmt: skip
    text = refused(*overrides)
    assert words in text
    assert "rows.jsonl: row 1 (line 2)" in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("class compute_score: ...\n", "is a class (mine.py:1); name it in reward.sources"),
        ("compute_score = 7\n", "is 7, not a function"),
    ],
)
def test_what_is_no_function(text, words):
    Path("mine.py").write_text(text)
    assert words in refused("reward.custom_function.path=mine.py")


# ------------------------------------------------------------------------------------------- rows and folders


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": "1+1"}, "field 'prompt': must be a list of {role, content}, is '1+1'"),
        ({"prompt": [{"content": "1+1"}]}, "field 'prompt[0].role': must be one of"),
        ({"reward_model": None}, "the ground truth must be a number, is None"),
        ({"data_source": "arithmatic"}, "no reward for data_source 'arithmatic'"),
        ({"agent_name": "tool_agnt"}, "unknown agent 'tool_agnt'"),
        ({"extra_info": {"tools_kwargs": {"calculater": {}}}}, "unknown tool 'calculater'"),
    ],
)
def test_a_malformed_training_row(change, words):
    write(*[ROW] * 3, {**ROW, **change})
    text = refused()
    assert words in text
    assert text.startswith("rows.jsonl: row 3 (line 4): ")


def test_each_file_is_checked_up_to_a_bound():
    write(*[ROW] * 3, {**ROW, "prompt": 7})
    write(ROW, {**ROW, "prompt": 8}, file="more.jsonl")
    both = "data.train_files=[rows.jsonl, more.jsonl]"
    assert refused(both, "data.check_rows=2").startswith("more.jsonl: row 1 (line 2): field 'prompt'")
    assert refused(both, "data.check_rows=4").startswith("rows.jsonl: row 3 (line 4): field 'prompt'")
    assert "no task in" not in refused(
        both,
        "data.max_train_rows=2",
        "data.max_prompt_tokens=1",
        "trainer.steps=null",
        "buffer.groups_per_step=64",
    )


def test_too_few_rows_for_a_batch():
    assert (
        "1 tasks times trainer.total_epochs=1 do not fill one batch of buffer.groups_per_step=64"
        in refused("trainer.steps=null", "trainer.total_epochs=1", "buffer.groups_per_step=64")
    )


def test_an_empty_mapping_on_the_command_line_empties():
    Path("config.yaml").write_text(
        yaml.safe_dump(
            {
                **CONFIG,
                "tracking": {"baselines": {"warm": "nowhere"}},
                "agent": {
                    "tool_limits": {"calculator": {"timeout_s": 3}},
                    "tool_config": {"calculator": {"digits": 3}},
                },
            }
        )
    )

    def shown(*overrides: str) -> str:
        result = command("config", "show", "config.yaml", *overrides)
        assert result.exit_code == 0, result.exception
        return result.output

    assert "warm: nowhere" in shown()
    assert "baselines: {}" in shown("tracking.baselines={}")
    assert "baselines:\n    mine: x\n" in shown("tracking.baselines={}", "tracking.baselines.mine=x")
    assert "calculator: {}" in shown("agent.tool_config.calculator={}")
    assert "timeout_s: 3.0\n" not in shown("agent.tool_limits.calculator={}")
    assert "warm: nowhere" in shown("tracking.baselines={mine: x}"), "what is not empty is added"


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "gigpo"])
def test_a_group_of_one_has_nothing_to_compare(advantage):
    found = command(
        "train", "config.yaml", "rollout.group_size=1", f"algorithm.advantage={advantage}"
    ).exception
    assert isinstance(found, ConfigError)
    assert (
        f"rollout.group_size=1 with algorithm.advantage={advantage}: attempts are compared within their "
        "group, so every advantage is 0 and nothing is learned"
    ) in str(found)
    for cure in ({"singleton": "raw", "advantage": advantage}, {"advantage": "gae"}, {"advantage": "remax"}):
        Config.model_validate({"rollout": {"group_size": 1}, "algorithm": cure})


def test_the_commands_themselves():
    Path("mine.py").write_text(TOOL.replace("async def call", "def call"))
    words = "agent.tools: tool 'shout' (mine.py:8): `call` is not async: write `async def call`"
    for arguments in (
        ["train"],
        ["eval", "--model", "model", "--on", "rows.jsonl", "--out", "out"],
    ):
        result = command(arguments[0], "config.yaml", *USE_TOOL, *arguments[1:])
        assert isinstance(result.exception, PluginError), (arguments, result.exception, result.output)
        assert str(result.exception) == words, arguments
