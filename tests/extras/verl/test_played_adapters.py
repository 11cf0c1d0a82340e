"""MCP servers and verl's plugins in whole conversations: scripted model, real loop, toolbox and rewards."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentrl.adapters.catalog import open_plugins
from agentrl.config.agent import MCPServerConfig
from agentrl.errors import DataError
from agentrl.types import Outcome
from parts.rewards import Number
from parts.rollout_stage import chat as chat
from parts.rollout_stage import stage as stage

SERVER = Path(__file__).parents[2] / "parts" / "mcp_server.py"
TOOLS = """
tools:
  - class_name: verl.tools.gsm8k_tool.Gsm8kTool
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: calc_gsm8k_reward
        description: Check an answer.
        parameters: {type: object, properties: {answer: {type: string}}, required: [answer]}
"""
INTERACTIONS = (
    "interaction: [{name: checker, class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction, config: "
    "{}}]"
)


def open_world(stage, script, *, agent: dict, **options):
    world = stage.World(script, agent={"tools": (), **agent}, **options)
    world.plugins = open_plugins(world.agent)
    world.plugins.rewards.add(Number)
    return world


def answers(trajectory) -> list[str]:
    return [message.content for message in trajectory.messages if message.role == "tool"]


def test_the_tools_of_one_trajectory_share_a_session_and_no_other_has_it(stage):
    """Two tools, in two turns and side by side: the server remembers what this trajectory told it, and
    nothing else.
    """

    def script(turn: int, text: str) -> str:
        word = "red" if "red" in text.split("assistant")[0] else "blue"
        return [
            stage.call("s_remember", f'{{"text": "{word}"}}') + stage.call("s_process_id", "{}"),
            stage.call("s_recall", "{}"),
            "done",
        ][turn]

    server = MCPServerConfig(command=(sys.executable, str(SERVER), "stdio"), per_trajectory=True)
    world = open_world(
        stage, script, agent={"mcp_servers": {"s": server}, "max_turns": 3, "max_tool_calls_per_turn": 2}
    )
    tasks = [stage.task(f"Remember {word}.") for word in ("red", "blue")]
    trajectories = world.play(*tasks, real_time=True)
    assert [t.outcome for t in trajectories] == [Outcome.COMPLETED] * 2, [t.failure for t in trajectories]
    assert [(answers(t)[0], answers(t)[2]) for t in trajectories] == [("red", "red"), ("blue", "blue")]
    assert answers(trajectories[0])[1] != answers(trajectories[1])[1], "one process each"


def test_a_server_that_died_ends_the_trajectory_as_a_failure_of_the_tool(stage):
    server = MCPServerConfig(command=(sys.executable, str(SERVER), "stdio"))
    world = open_world(stage, lambda turn, _: stage.call("s_die", "{}"), agent={"mcp_servers": {"s": server}})
    (trajectory,) = world.play(stage.task(), real_time=True)
    assert trajectory.outcome is Outcome.TOOL_ERROR
    assert "MCP server 's'" in str(trajectory.failure)
    assert "was lost" in str(trajectory.failure)


def test_verls_tool_with_rewards_per_call_and_at_the_end(stage, tmp_path):
    (tmp_path / "tools.yaml").write_text(TOOLS)
    turns = [
        stage.call("calc_gsm8k_reward", '{"answer": "41"}'),
        stage.call("calc_gsm8k_reward", '{"answer": "42"}'),
        "#### 42",
    ]
    world = open_world(
        stage,
        lambda turn, _: turns[turn],
        agent={"verl_tool_config": str(tmp_path / "tools.yaml")},
        reward={"tool_reward_weight": 2.0},
    )
    task = stage.task(tools_kwargs={"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "42"}}})
    (trajectory,) = world.play(task, real_time=True)
    assert answers(trajectory) == [
        "Current parsed answer='41' reward=0.0",
        "Current parsed answer='42' reward=1.0",
    ]
    given = [
        (event.value, int(trajectory.turn_ids[event.position]))
        for event in trajectory.rewards
        if event.name.startswith("tool/")
    ]
    assert given == [(-0.1, 0), (0.0, 1), (2.0, 2)]
    assert trajectory.metrics["reward/tool"] == pytest.approx(0.95)


def test_verls_interaction(stage, tmp_path):
    (tmp_path / "interactions.yaml").write_text(INTERACTIONS)
    world = open_world(
        stage,
        lambda turn, _: f"#### {41 + turn}",
        agent={"verl_interaction_config": str(tmp_path / "interactions.yaml")},
    )
    task = stage.task(
        agent="interaction_agent", interaction_kwargs={"name": "checker", "query": "?", "ground_truth": "42"}
    )
    (trajectory,) = world.play(task, real_time=True)
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.failure
    said = [message.content for message in trajectory.messages if message.role == "user"]
    assert said[1:] == ["Your response is incorrect! You need to reflect on your answer and try again."]
    assert trajectory.metrics["reward/interaction"] == 1.0


def test_a_row_chooses_among_the_tools(stage, tmp_path):
    (tmp_path / "tools.yaml").write_text(TOOLS)
    world = open_world(
        stage,
        lambda turn, _: "x",
        agent={"verl_tool_config": str(tmp_path / "tools.yaml"), "tools": ("calculator",)},
    )
    offered = world.plugins.offered_tools
    assert offered(stage.task(), ("calculator",)) == ("calculator", "calc_gsm8k_reward")
    assert offered(stage.task(extra_info={"tool_selection": ["calc_gsm8k_reward"]}), ("calculator",)) == (
        "calc_gsm8k_reward",
    )
    assert offered(stage.task(extra_info={"tool_selection": []}), ("calculator",)) == ()
    assert len(offered(stage.task(extra_info={"tool_selection": None}), ("calculator",))) == 2
    with pytest.raises(
        DataError, match="tool_selection: 'python' is not offered; offered: calculator, calc_gsm8k_reward"
    ):
        offered(stage.task(extra_info={"tool_selection": ["python"]}), ("calculator",))
