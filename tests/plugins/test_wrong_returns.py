"""What a plugin returns or constructs wrongly is its own failure, with its line, the type and the cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.types import Outcome
from parts.scripted import call, play

HEAD = """import datetime
import agentrl.plugins as rl
from agentrl.types import Image, Message

"""
TOOL = """class Note(rl.Tool):
    name = "note"
    description = "Write a note."
    parameters = {"type": "object", "properties": {}}

    async def call(self, arguments):
        return RETURNED

    async def later(self):
        return "ok"
"""
PARTNER = """class Boss(rl.Interaction):
    name = "boss"

    async def respond(self, messages):
        return RETURNED
"""
AGENT = """class Lazy(rl.AgentLoop):
    name = "lazy"

    async def run(self, task, session):
        turn = session.generate()
        RETURNED
"""
WORLD = """class World(rl.Environment):
    name = "world"

    async def facts(self):
        return FACTS

    async def later(self):
        return {}

    @rl.tool
    async def look(self) -> str:
        \"\"\"Look.\"\"\"
        return LOOK
"""


def written(tmp_path: Path, text: str, name: str) -> str:
    (tmp_path / "mine.py").write_text(HEAD + text)
    return f"{tmp_path}/mine.py:{name}"


def line_of(tmp_path: Path, text: str) -> str:
    lines = (tmp_path / "mine.py").read_text().splitlines()
    return f"{tmp_path}/mine.py:{next(i for i, line in enumerate(lines, 1) if text in line)}"


RETURNED = "tool 'note' returned "
RAISED = "tool 'note' raised in `call`: "


@pytest.mark.parametrize(
    ("returned", "at", "words"),
    [
        ("{'a': 1}", "async def call", RETURNED + "dict {'a': 1}; return agentrl.plugins.ToolResult"),
        ("'ok'", "async def call", RETURNED + "str 'ok'; return"),
        ("None", "async def call", RETURNED + "None; return"),
        ("('ok', 0.0, {})", "async def call", "a tuple is verl's form, for files in agent.verl_tool_config"),
        ("self.later()", "async def call", RETURNED + "a coroutine (did you forget `await`?); return"),
        ("rl.ToolResult({'a': 1})", "return", RAISED + "TypeError: ToolResult.text is dict {'a': 1}; it must "
         "be a text, such as json.dumps(value)"),
        ("rl.ToolResult(42)", "return", RAISED + "TypeError: ToolResult.text is int 42; it must be a text"),
        ("rl.ToolResult(self.later())", "return", "ToolResult.text is a coroutine (did you forget `await`?)"),
        ("rl.ToolResult('a' + self.later())", "return", "did you forget `await`?"),
        ("rl.ToolResult('', reward='1.0')", "return", "ToolResult.reward is str '1.0'; it must be a number"),
        ("rl.ToolResult('', reward=float('nan'))", "return", "ValueError: ToolResult.reward is nan; it must "
         "be finite"),
        ("rl.ToolResult('', metrics={'a': 'b'})", "return", "ToolResult.metrics['a'] is str 'b'; it must be"),
        ("rl.ToolResult('', metrics=[1])", "return", "ToolResult.metrics is list [1]; it must map names to"),
        ("rl.ToolResult('', is_error='no')", "return", "ToolResult.is_error is str 'no'; it must be True or"),
        ("rl.ToolResult('', state=3)", "return", "ToolResult.state is int 3; it must be a text or None"),
        ("rl.ToolResult('', images=['a.png'])", "return", "ToolResult.images[0] is str 'a.png'; it must be"),
        ("rl.ToolResult('', images=(Image('a.png'),))", "return", "ToolResult.images[0].data is str 'a.png'"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_tool(tmp_path, returned, at, words):
    tool = written(tmp_path, TOOL.replace("RETURNED", returned), "Note")
    trajectory = play([call("note"), "done"], tools=[tool])
    assert (trajectory.outcome, str(trajectory.failure.plugin)) == (Outcome.TOOL_ERROR, "tool 'note'")
    assert words in trajectory.failure.text
    assert trajectory.failure.place == line_of(tmp_path, at)


@pytest.mark.parametrize(
    ("returned", "at", "words"),
    [
        ("None", "async def respond", "interaction 'boss' returned None; return agentrl.plugins.Interaction"),
        ("(False, 'again', 0.0, {})", "async def respond", "(text, is_done, reward): a tuple is verl's form"),
        ("rl.InteractionReply(1, is_done=True)", "return", "InteractionReply.text is int 1; it must be a"),
        ("rl.InteractionReply('a', is_done=1)", "return", "InteractionReply.is_done is int 1; it must be"),
    ],
)
def test_a_partner(tmp_path, returned, at, words):
    partner = written(tmp_path, PARTNER.replace("RETURNED", returned), "Boss")
    trajectory = play(["hi"], agent="interaction_agent", interaction=partner)
    assert trajectory.outcome is Outcome.TOOL_ERROR
    assert words in trajectory.failure.text
    assert trajectory.failure.place == line_of(tmp_path, at)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("await session.call_tools(turn)", "has no attribute 'tool_calls'; did you forget `await`?"),
        ("return turn.tool_calls", "has no attribute 'tool_calls'; did you forget `await`?"),
        ("await turn; session.add_reward('x', '1.0')", "TypeError: reward 'x' is str '1.0'; it must be a"),
        ("await turn; session.add_user_message(42)", "TypeError: Message.content is int 42; it must be a"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine")
def test_an_agent(tmp_path, line, words):
    agent = written(tmp_path, AGENT.replace("RETURNED", line), "Lazy")
    trajectory = play(["hi"], agent=agent)
    assert trajectory.outcome is Outcome.ABORTED
    assert words in trajectory.failure.text
    assert trajectory.failure.place == line_of(tmp_path, line)


@pytest.mark.parametrize(
    ("facts", "look", "outcome", "at", "words"),
    [
        ("{'a': {'when': datetime.datetime(2026, 1, 1)}}", "''", Outcome.ENVIRONMENT_ERROR, "def facts",
         "return plain JSON data: facts['a']['when'] is datetime"),
        ("{'a': [1, {2}]}", "''", Outcome.ENVIRONMENT_ERROR, "def facts", "facts['a'][1] is set {2}"),
        ("{(1, 2): 3}", "''", Outcome.ENVIRONMENT_ERROR, "def facts", "facts has the key tuple (1, 2)"),
        ("[1]", "''", Outcome.ENVIRONMENT_ERROR, "def facts", "`facts` returned list [1]; return a dict"),
        ("self.later()", "''", Outcome.ENVIRONMENT_ERROR, "def facts", "`facts` returned a coroutine (did"),
        ("{}", "object()", Outcome.TOOL_ERROR, "@rl.tool", "tool 'look' returned object; return a text"),
        ("{}", "self.later()", Outcome.TOOL_ERROR, "@rl.tool", "tool 'look' returned a coroutine (did you"),
    ],
)  # fmt: skip
def test_an_environment(tmp_path, facts, look, outcome, at, words):
    world = written(tmp_path, WORLD.replace("FACTS", facts).replace("LOOK", look), "World")
    trajectory = play([call("look"), "done"], environment=world)
    assert trajectory.outcome is outcome
    assert words in trajectory.failure.text
    assert trajectory.failure.place == line_of(tmp_path, at)


@pytest.mark.parametrize("score", ["'1.0'", "float('inf')", "[1.0]"])
def test_the_score_of_a_tool(tmp_path, score):
    text = TOOL.replace("RETURNED", "rl.ToolResult('')")
    text += f"\n    async def score(self):\n        return {score}\n"
    trajectory = play([call("note"), "done"], tools=[written(tmp_path, text, "Note")])
    assert trajectory.outcome is Outcome.TOOL_ERROR
    assert "tool 'note': `score` returned" in trajectory.failure.text
    assert trajectory.failure.place == line_of(tmp_path, "async def score")


def test_numbers_of_numpy_are_numbers(tmp_path):
    result = "rl.ToolResult('ok', np.float32(0.5), {'n': np.int64(2)}, is_final=np.True_)"
    text = "import numpy as np\n\n\n" + TOOL.replace("RETURNED", result)
    trajectory = play([call("note"), "done"], tools=[written(tmp_path, text, "Note")])
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.failure
    assert (trajectory.metrics["note/n"], trajectory.metrics["num_turns"]) == (2.0, 1.0)
