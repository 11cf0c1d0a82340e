"""An MCP server serves a training run: over stdio, started by the rollout actors, and over HTTP, running
beside it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.data.trajectories import decode, read_parquet

SERVER = str(Path(__file__).parents[2] / "parts" / "mcp_server.py")
QUESTION = {"role": "user", "content": "6*7=?"}
CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "calculator", "arguments": json.dumps({"expression": "6*7"})},
}
CONVERSATION = [
    QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "MCP says 42", "tool_call_id": "call00000", "name": "calculator"},
    {"role": "assistant", "content": "#### 42"},
]
TASK = {
    "data_source": "arithmetic",
    "prompt": [QUESTION],
    "agent_name": "tool_agent",
    "reward_model": {"style": "rule", "ground_truth": "42"},
}
CONFIG = """
data:
  train_files: [{folder}/{data}.jsonl]
agent:
  mcp_servers:
    math:
      prefix: ""
      tools: [calculator]
      {address}
"""
SFT = """
from_scratch:
  architecture: qwen2
  sizes: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
    max_position_embeddings: 1024, tie_word_embeddings: true, initializer_range: 0.1}
learner:
  microbatch_tokens: 4096
  optimizer: {lr: 5.0e-3, weight_decay: 0.0}
"""  # noqa: E501
TRAIN = """
  max_turns: 2
  max_response_tokens: 160
  max_turn_tokens: 64
rollout: {group_size: 4}
buffer: {groups_per_step: 4, stall_timeout_s: 120}
learner: {microbatch_tokens: 4096}
"""


def stdio(calls: Path) -> str:
    return f"command: [{sys.executable}, {SERVER}, stdio]\n      env: {{MCP_CALLS: {calls}}}"


@pytest.fixture(scope="module")
def policy(world) -> Path:
    """A policy that calls the calculator, and knows nothing else."""
    folder = world.folder / "mcp"
    folder.mkdir()
    (folder / "sft.jsonl").write_text(
        f"{json.dumps({'messages': CONVERSATION, 'tools': ['calculator']})}\n" * 8
    )
    (folder / "train.jsonl").write_text(f"{json.dumps(TASK)}\n" * 8)
    config = folder / "sft.yaml"
    config.write_text(CONFIG.format(folder=folder, data="sft", address=stdio(folder / "none")) + SFT)
    command = world.start(
        "sft", str(config), "trainer.steps=60", "trainer.batch_size=8", f"trainer.output={folder}/policy"
    )
    assert command.wait() == 0, command.output()
    assert command.left_behind() == []
    return folder / "policy"


def train(world, policy: Path, name: str, address: str) -> list:
    """Train for 2 steps and return all trajectories."""
    folder = policy.parent
    config = folder / f"{name}.yaml"
    config.write_text(CONFIG.format(folder=folder, data="train", address=address) + TRAIN)
    run_dir = folder / name
    command = world.start(
        "train", str(config), f"model.path={policy}", "trainer.steps=2", f"trainer.run_dir={run_dir}"
    )
    assert command.wait() == 0, command.output()
    assert "Traceback" not in command.output()
    assert command.left_behind() == []
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["step"], result["balanced"]) == (2, True)
    return [
        t for path in sorted((run_dir / "trajectories").glob("*.parquet")) for t in decode(read_parquet(path))
    ]


def check(trajectories: list, calls: Path) -> None:
    """The server's answers stand in the trajectories, and each came from a call that it got."""
    answers = [message for t in trajectories for message in t.messages if message.role == "tool"]
    served = [message for message in answers if message.content == "MCP says 42"]
    assert len(trajectories) == 2 * 4 * 4
    assert len(served) >= 24
    assert sum(t.reward for t in trajectories) >= 24, "the answers were of use"
    assert {message.name for message in served} == {"calculator"}
    assert calls.read_text().splitlines().count("6*7") >= len(served)


@pytest.mark.slow
def test_over_stdio(world, policy, tmp_path):
    calls = tmp_path / "calls"
    check(train(world, policy, "stdio", stdio(calls)), calls)


@pytest.mark.slow
def test_over_http(world, policy, tmp_path):
    calls = tmp_path / "calls"
    server = subprocess.Popen(
        [sys.executable, SERVER, "http", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={"MCP_CALLS": str(calls)},
    )
    try:
        port = server.stdout.readline().strip()
        check(train(world, policy, "http", f"url: http://127.0.0.1:{port}/mcp"), calls)
    finally:
        server.kill()
        server.wait()
