"""`agentrl play`: a person, a script and a server as the model; what is shown is what was recorded."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.cli.app import app
from agentrl.config.compose import load_config
from agentrl.errors import ConfigError, ServerError
from agentrl.extras.datatools.arithmetic import write_arithmetic
from agentrl.extras.testing.one_row.models import read_script, read_typed
from agentrl.extras.testing.one_row.play import play_row
from agentrl.extras.testing.one_row.show import ACTION_STYLE, coloured_tokens, show, stretches
from agentrl.testing import Call, Raw, Says
from agentrl.types import Outcome

CONFIG = """
data: {train_files: [data/train.parquet], val_files: [data/val.parquet]}
model: {path: model}
agent: {tools: [calculator], max_response_tokens: 1024}
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    write_tiny_tokenizer(folder / "model")
    write_arithmetic(folder / "data", seed=0, num_train=6, num_val=3, num_sft=1)
    (folder / "config.yaml").write_text(CONFIG)
    return folder


@pytest.fixture(autouse=True)
def here(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)


def typing(text: str):
    lines = iter(text.splitlines())
    return lambda: next(lines, None)


def play(model: str = "person", typed: str = "", said: list | None = None, **options):
    overrides = options.pop("overrides", ["agent.default=tool_agent"])
    options = {"row": 0, "read": typing(typed), "say": (said if said is not None else []).append, **options}
    return play_row(load_config("config.yaml", overrides), model=model, **options)


def a_row_of(agent: str) -> int:
    return next(row for row in range(6) if play(row=row).task.agent_name == agent)


def test_a_person_plays_the_model() -> None:
    said: list[str] = []
    row = a_row_of("tool_agent")
    played = play(
        typed='Let me compute.\n/call calculator {"expression": "6*7"}\n\n#### 42\n\n', said=said, row=row
    )
    trajectory = played.trajectory
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.failure
    assert [message.role for message in trajectory.messages[-4:]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert trajectory.messages[-2].content == "42"
    assert played.task.messages[-1].content in said[1], "the person reads the prompt"
    assert "<tool_response>42" in said[2], "and the tool's answer"


def test_a_person_who_mistypes_is_asked_again() -> None:
    said: list[str] = []
    trajectory = play(
        typed="/call calculator {\n\n#### 1\n\n", said=said, row=a_row_of("tool_agent")
    ).trajectory
    assert "not valid JSON" in said[2]
    assert trajectory.outcome is Outcome.COMPLETED


def test_a_person_who_gives_up_ends_the_trajectory() -> None:
    trajectory = play().trajectory
    assert trajectory.outcome is Outcome.MODEL_ERROR
    assert "gave up" in str(trajectory.failure)


def test_what_was_typed() -> None:
    assert read_typed(["a", "/call f", '/call g {"x": 1}', "b"]) == Says(
        "a\nb", (Call("f", {}), Call("g", {"x": 1}))
    )
    with pytest.raises(ConfigError, match="must be a JSON object"):
        read_typed(["/call f [1]"])


def test_a_script_of_turns(project: Path) -> None:
    (project / "turns.yaml").write_text(
        "- {text: hm, calls: [{name: calculator, arguments: {expression: 1+1}}], reasoning: easy}\n- raw: "
        "'<tool_call>{'\n- done\n"
    )
    turns = [Says("hm", (Call("calculator", {"expression": "1+1"}),), "easy"), Raw("<tool_call>{"), "done"]
    assert read_script("turns.yaml") == turns
    trajectory = play("turns.yaml", row=a_row_of("tool_agent")).trajectory
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.failure
    assert trajectory.metrics["num_tool_errors"] == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: b", "must be a list of turns"),
        ("- {txt: a}", "unknown key 'txt'"),
        ("- 7", "turn 1: 7"),
        ("- {calls: [{arguments: {}}]}", "calls must be a list"),
        ("[", "cannot be read"),
    ],
)
def test_malformed_scripts(project: Path, text: str, problem: str) -> None:
    (project / "wrong.yaml").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_script("wrong.yaml")


def test_what_is_shown_is_what_was_recorded() -> None:
    played = play(typed='/call calculator {"expression": "6*7"}\n\n#### é 42\n\n', row=a_row_of("tool_agent"))
    trajectory = played.trajectory
    covered = [index for start, end in stretches(trajectory) for index in range(start, end)]
    assert covered == list(range(trajectory.num_tokens)), "each token is shown once"
    for start, end in stretches(trajectory):
        assert len(set(trajectory.action_mask[start:end].tolist())) == 1
    text = coloured_tokens(played)
    shown = text.plain
    for event in trajectory.rewards:
        shown = shown.replace(f"[{event.name} {event.value:+g}]", "")
    assert shown == played.chat.decode(trajectory.token_ids.tolist())
    green = "".join(text.plain[span.start : span.end] for span in text.spans if span.style == ACTION_STYLE)
    assert green == played.chat.decode(trajectory.token_ids[trajectory.action_mask].tolist())


def test_everything_is_printed() -> None:
    played = play(typed="#### [bold]42\n\n", row=a_row_of("tool_agent"))
    out = io.StringIO()
    show(played, Console(file=out, width=200, color_system=None))
    for part in (
        "tool_agent",
        "#### [bold]42",
        "rewards",
        "arithmetic",
        "ground truth",
        "outcome: completed",
        "num_turns=1",
    ):
        assert part in out.getvalue()


PARTNER = """
from agentrl.plugins import Interaction, InteractionReply

class Boss(Interaction):
    name = "boss"
    async def respond(self, messages):
        return InteractionReply("that will do", is_done=True, reward=0.5)
    async def finalize(self):
        self.phone.hang_up()
"""


def printed(played) -> str:
    out = io.StringIO()
    show(played, Console(file=out, width=300, color_system=None))
    return out.getvalue()


def test_how_the_partner_ended_it_and_what_failed_afterwards_is_shown(project: Path) -> None:
    (project / "boss.py").write_text(PARTNER)
    (project / "boss.jsonl").write_text(
        '{"data_source": "arithmetic", "prompt": [{"role": "user", "content": "1+1"}], "reward_model": '
        '{"ground_truth": "2"}, "extra_info": {"interaction_kwargs": {"name": "boss"}}}'
    )
    overrides = ["agent.plugins=[boss.py]", "data.train_files=[boss.jsonl]"]
    shown = printed(play(typed="#### 2\n\n", overrides=overrides))
    assert "boss ended the conversation, reward 0.5: that will do" in shown
    survived = (
        "interaction 'boss' raised in `finalize`: AttributeError: 'Boss' object has no attribute 'phone'"
    )
    assert f"a failure that did not end the attempt: {survived} (boss.py:9)" in shown
    assert "outcome: completed, reward" in shown


@pytest.mark.parametrize(
    ("override", "outcome"),
    [
        ("agent.max_response_tokens=45", "outcome: truncated: max_response_tokens=45, reward"),
        ("agent.max_turn_tokens=5", "outcome: truncated: max_turn_tokens=5, reward"),
        ("agent.max_turns=1", "outcome: turn_limit: max_turns=1, reward"),
    ],
)
def test_the_limit_that_cut_it_is_named(project: Path, override: str, outcome: str) -> None:
    (project / "call.yaml").write_text(
        "- calls: [{name: calculator, arguments: {expression: '1+1'}}]\n- a long answer, which goes on\n"
    )
    row = a_row_of("tool_agent")
    played = play("call.yaml", row=row, overrides=["agent.default=tool_agent", override])
    assert outcome in printed(played)


def test_an_answer_that_did_not_fit_is_shown(project: Path) -> None:
    (project / "call.yaml").write_text("- calls: [{name: calculator, arguments: {expression: '10**40'}}]\n")
    row = a_row_of("tool_agent")
    overrides = ["agent.default=tool_agent", "agent.max_response_tokens=50"]
    shown = printed(play("call.yaml", row=row, overrides=overrides))
    assert "outcome: truncated: max_response_tokens=50" in shown
    assert f"tool calculator  {10**40}  (the model did not see it)" in shown


@pytest.mark.parametrize("path", ["runs/not/there", ""])
def test_a_row_is_played_without_a_model(path: str) -> None:
    said: list[str] = []
    played = play(
        typed="#### 2\n\n", said=said, overrides=["agent.default=tool_agent", f"model.path='{path}'"]
    )
    assert played.trajectory.outcome is Outcome.COMPLETED
    assert (
        "played with the tokenizer and the template of from_scratch, whose tokens are single bytes" in said[0]
    )
    with pytest.raises(ConfigError, match=r"model\.path"):
        play("http://127.0.0.1:9", overrides=[f"model.path='{path}'"])


def test_an_agent_that_the_row_does_not_use_is_said(project: Path) -> None:
    said: list[str] = []
    row = a_row_of("tool_agent")
    play(row=row, said=said, overrides=["agent.default=react_agent"])
    assert said[0] == "the row names tool_agent; agent.default=react_agent is not used"
    said.clear()
    play(row=row, said=said)
    assert "is not used" not in said[0]


def test_the_command_itself(project: Path) -> None:
    (project / "answer.yaml").write_text("- '#### 1'\n- '#### 2'\n- '#### 3'\n")
    result = CliRunner().invoke(
        app, ["play", "config.yaml", "agent.max_turns=2", "--row", "1", "--val", "--model", "answer.yaml"]
    )
    assert result.exit_code == 0, result.output
    assert "outcome: " in result.output


def test_what_the_model_says_commands_no_terminal(project: Path) -> None:
    (project / "turns.yaml").write_text(
        '- calls: [{name: "calc\\e]0;owned\\a", arguments: {expression: "1\\e[31m"}}]\n- "#### \\e[2Jgone"\n'
        * 2
    )
    result = CliRunner().invoke(app, ["play", "config.yaml", "--row", "0", "--model", "turns.yaml"])
    assert result.exit_code in (0, 1), result.output
    assert r"\x1b]0;owned\x07" in result.output
    assert "\x1b" not in result.output


BROKEN = """
from typing import ClassVar

from agentrl.errors import PluginError
from agentrl.plugins import AgentLoop, Tool

class Broken(AgentLoop):
    name: ClassVar[str] = "broken"

    async def run(self, task, session):
        raise PluginError("no key for the service")

class Sick(Tool):
    name: ClassVar[str] = "sick"
    description: ClassVar[str] = "Breaks."
    parameters: ClassVar[dict] = {"type": "object", "properties": {}}

    async def call(self, arguments):
        raise ConnectionError("away")

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {}["boom"]
"""


@pytest.mark.parametrize(
    ("overrides", "outcome", "line"),
    [
        (["agent.default=broken"], "aborted", 11),
        (["agent.default=tool_agent", "agent.tools=[sick]"], "tool_error", 19),
        (["agent.default=tool_agent", "reward.custom_function.path=broken.py"], "reward_error", 22),
    ],
)
@pytest.mark.parametrize("debug", [True, False])
def test_a_failed_attempt_ends_the_command_with_1_and_names_the_line(
    project: Path, overrides, outcome, line, debug, monkeypatch
) -> None:
    monkeypatch.delenv("AGENTRL_DEBUG", raising=False)
    (project / "broken.py").write_text(BROKEN)
    (project / "calls.yaml").write_text("- calls: [{name: sick, arguments: {}}]\n- '#### 1'\n")
    rows = [
        '{"data_source": "arithmetic", "prompt": [{"role": "user", "content": "1+1"}], "reward_model": '
        '{"ground_truth": "2"}}'
    ]
    (project / "rows.jsonl").write_text("\n".join(rows))
    arguments = [
        "play",
        "config.yaml",
        "agent.plugins=[broken.py]",
        "data.train_files=[rows.jsonl]",
        *overrides,
    ]
    result = CliRunner().invoke(app, [*arguments, "--model", "calls.yaml", *(["--debug"] if debug else [])])
    assert result.exit_code == 1, result.output
    said = " ".join(result.output.split())
    assert f"outcome: {outcome}: " in said
    assert f"(broken.py:{line}); it has no reward" in said
    assert "reward 0" not in said
    assert ("Traceback" in said) == debug
    monkeypatch.delenv("AGENTRL_DEBUG", raising=False)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"row": 99}, "row 99 does not exist: data.train_files have 6 rows"),
        ({"overrides": ["data.train_files=[]"]}, "data.train_files is empty"),
        ({"model": "absent.yaml"}, "'absent.yaml' cannot be read"),
    ],
)
def test_wrong_arguments(options, problem) -> None:
    with pytest.raises(ConfigError, match=problem):
        play(**options)


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(ServerError, match="cannot connect"):
        play("http://127.0.0.1:9")
