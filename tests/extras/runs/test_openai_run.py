"""A program written for OpenAI's client, unchanged, is trained through the gateway on the quickstart's
task.
"""

from __future__ import annotations

import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
from agentrl.tools.calculator import Calculator

import agentrl
from agentrl.cluster import servers
from agentrl.data.trajectories import decode, read_parquet
from agentrl.extras.datatools.arithmetic import write_arithmetic
from agentrl.rollout.limits import key_of_started
from agentrl.types import NO_VERSION, SCORED_OUTCOMES, Outcome

PROGRAM = '''
"""A tool loop as OpenAI's documentation writes it; nothing in it knows of training."""

import ast
import json
import operator
import os
import sys

import openai

CALCULATOR = {schema}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def evaluate(node):
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
    return node.value


def run(call):
    try:
        return str(evaluate(ast.parse(json.loads(call.function.arguments)["expression"], mode="eval").body))
    except Exception as error:
        return f"error: {type(error).__name__}"


async def solve(task, *, base_url, api_key, model):
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages = list(task["messages"])
    for _ in range(3):
        reply = await client.chat.completions.create(model=model, messages=messages, tools=[CALCULATOR], temperature=1.0)
        message = reply.choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": run(call)})
        if not message.tool_calls:
            # Only so that there is context between turns also with a policy that calls nothing: the user asks again once.
            if len(messages) > len(task["messages"]) + 1:
                return
            messages.append({"role": "user", "content": "Are you sure?"})


if __name__ == "__main__":
    task = json.load(sys.stdin)
    answer = openai.OpenAI().chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=task["messages"])
'''  # noqa: E501


@pytest.fixture(scope="module")
def program(world, tmp_path_factory):
    """The program, and the quickstart's rows with `openai_agent` as the agent of each."""
    folder = tmp_path_factory.mktemp("openai")
    (folder / "my_agent.py").write_text(PROGRAM.replace("{schema}", repr(Calculator().schema())))
    rows = pq.read_table(world.folder / "data/train.parquet")
    column = rows.schema.get_field_index("agent_name")
    pq.write_table(
        rows.set_column(column, "agent_name", [["openai_agent"] * len(rows)]), folder / "train.parquet"
    )
    return folder


def train(world, program, name: str, *overrides: str):
    config = agentrl.load_config(
        str(world.config),
        [
            f"trainer.run_dir={world.folder / name}",
            f"data.train_files=[{program}/train.parquet]",
            "agent.tools=[]",
            *overrides,
        ],
    )
    return agentrl.train(config)


def trajectories_of(world, name: str):
    paths = sorted((world.folder / name / "trajectories").glob("step_*.parquet"))
    return [trajectory for path in paths for trajectory in decode(read_parquet(path))]


@pytest.mark.slow
def test_a_program_with_the_openai_client_is_trained_for_five_steps(world, program, monkeypatch):
    keys = []

    def seen(variable):
        keys.append(key_of_started(variable))
        return keys[-1]

    monkeypatch.setattr(servers, "key_of_started", seen)
    result = train(
        world,
        program,
        "openai",
        f"agent.agent_config.openai_agent={{target: {program}/my_agent.py:solve}}",
        "agent.max_turns=3",
        "agent.max_response_tokens=96",
        "buffer.max_staleness=1",
        "trainer.steps=5",
    )
    assert result.step == 5
    assert result.counts.is_balanced
    (key,) = keys
    assert len(key) > 32
    files = [path for path in (world.folder / "openai").rglob("*") if path.is_file()]
    assert not [path for path in files if key.encode() in path.read_bytes()], (
        "the key of the servers stands in a file of the run"
    )
    assert result.counts.consumed == 20

    records = world.records(world.folder / "openai").train
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5]
    assert all(0 <= r["rollout/lag/max"] <= 1 for r in records)
    # On the first step no update came between sampling and learning: server and learner agree on every
    # recorded token.
    assert records[0]["rollout/lag/max"] == 0
    assert records[0]["learner/mismatch_max"] < 1e-4

    trajectories = trajectories_of(world, "openai")
    assert len(trajectories) == 40
    for trajectory in trajectories:
        check_record(trajectory, max_version=5)
    assert max(t.metrics["num_turns"] for t in trajectories) >= 2
    assert {t.segment_starts for t in trajectories} == {(0,)}, (
        "what the program sent back must continue its row"
    )


def check_record(trajectory, *, max_version: int) -> None:
    mask = trajectory.action_mask
    assert trajectory.outcome in SCORED_OUTCOMES, trajectory.failure
    assert trajectory.agent_name == "openai_agent"
    assert mask.any()
    assert not mask[0]
    assert np.isfinite(trajectory.behavior_logprobs).all()
    assert (trajectory.behavior_logprobs[mask] < 0).all()
    assert (trajectory.behavior_logprobs[~mask] == 0).all()
    assert ((trajectory.versions[mask] >= 0) & (trajectory.versions[mask] <= max_version)).all()
    assert (trajectory.versions[~mask] == NO_VERSION).all()
    turns = set(trajectory.turn_ids[mask].tolist())
    assert turns == set(range(int(trajectory.metrics["num_turns"])))
    assert all(mask[event.position] for event in trajectory.rewards)


COMMAND_LINE_AGENT = """
import json, sys

TOOL = {"name": "shout", "description": "Say a text loudly.", "schema": {"type": "object", "properties": {"text": {"type": "string"}}}}
question = json.load(sys.stdin)["messages"][-1]["content"]


def by_messages():
    import anthropic

    client, messages = anthropic.Anthropic(), [{"role": "user", "content": question}]
    tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["schema"]}
    for _ in range(3):
        system = [{"type": "text", "text": "You are an agent."}]
        with client.messages.stream(model="any", max_tokens=24, system=system, messages=messages, tools=[tool]) as stream:
            reply = stream.get_final_message()
        calls = [block for block in reply.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": c.id, "content": str(c.input).upper()} for c in calls]
        messages += [{"role": "assistant", "content": reply.content}]
        messages += [{"role": "user", "content": results or "Are you sure?"}]


def by_responses():
    import openai

    client, items = openai.OpenAI(), [{"role": "user", "content": question}]
    tool = {"type": "function", "name": TOOL["name"], "description": TOOL["description"], "parameters": TOOL["schema"]}
    for _ in range(3):
        asked = {"model": "any", "instructions": "You are an agent.", "input": items, "tools": [tool], "store": False}
        for event in client.responses.create(**asked, max_output_tokens=24, stream=True):
            pass
        calls = [item for item in event.response.output if item.type == "function_call"]
        items += [item.model_dump(exclude_none=True) for item in event.response.output]
        items += [{"type": "function_call_output", "call_id": c.call_id, "output": c.arguments.upper()} for c in calls]
        items += [] if calls else [{"role": "user", "content": "Are you sure?"}]


{"messages": by_messages, "responses": by_responses}[sys.argv[1]]()
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["messages", "responses"])
def test_a_command_line_agent_is_trained_in_each_dialect(world, program, dialect):
    """It knows its environment only, streams, and sends everything back: one segment per attempt."""
    (program / "agent.py").write_text(COMMAND_LINE_AGENT)
    train(
        world,
        program,
        dialect,
        f"agent.agent_config.openai_agent={{command: [{sys.executable}, {program}/agent.py, {dialect}]}}",
        "agent.max_turns=3",
        "agent.max_response_tokens=160",
        "trainer.steps=2",
        "buffer.groups_per_step=1",
        "rollout.max_concurrent_trajectories=2",
    )
    trajectories = trajectories_of(world, dialect)
    assert len(trajectories) == 4
    for trajectory in trajectories:
        check_record(trajectory, max_version=1)
        assert trajectory.segment_starts == (0,)
        assert [m.role for m in trajectory.messages][:3] == ["system", "user", "assistant"]
    assert max(t.metrics["num_turns"] for t in trajectories) == 3


@pytest.mark.slow
def test_a_command_is_trained(world, program):
    result = train(
        world,
        program,
        "command",
        f"agent.agent_config.openai_agent={{command: [{sys.executable}, {program}/my_agent.py]}}",
        "trainer.steps=1",
        "buffer.groups_per_step=1",
        "rollout.max_concurrent_trajectories=2",
    )
    assert result.step == 1
    trajectories = trajectories_of(world, "command")
    assert len(trajectories) == 2
    for trajectory in trajectories:
        check_record(trajectory, max_version=0)
        assert trajectory.metrics["num_turns"] == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_policy_that_calls_tools_is_trained_through_its_program(world, program):
    """With the quickstart's warm start the policy does call the program's calculator: the answers are context
    of the same row.
    """
    folder = world.folder / "openai_warm"
    write_arithmetic(folder / "data", seed=0, num_train=240, num_val=0, num_sft=3000)
    sft = world.start(
        "sft",
        "configs/quickstart_sft.yaml",
        f"data.train_files=[{folder}/data/sft.parquet]",
        f"trainer.output={folder}/warm_start",
    )
    assert sft.wait(800) == 0, sft.output()
    train(
        world,
        program,
        "openai_tools",
        f"agent.agent_config.openai_agent={{target: {program}/my_agent.py:solve}}",
        f"model.path={folder}/warm_start",
        "agent.max_turns=3",
        "agent.max_response_tokens=256",
        "agent.max_turn_tokens=64",
        "trainer.steps=5",
    )
    trajectories = trajectories_of(world, "openai_tools")
    for trajectory in trajectories:
        check_record(trajectory, max_version=5)
    used = [t for t in trajectories if any(message.role == "tool" for message in t.messages)]
    assert used, "the policy called no tool"
    assert all(t.segment_starts == (0,) for t in used)
    assert all(t.metrics["num_tool_calls"] >= 1 for t in used)
    assert any(t.reward == 1 for t in used if t.outcome is Outcome.COMPLETED), (
        "an answer of the program's calculator counted"
    )
