"""Everything that has a name can come from a package of somebody else, each thing in one file of its own: a
command, a loss, an estimator, a tool format, a transport, a tracker and a listener, all of them in one real
run.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.chat.chat import Chat
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.data.trajectories import decode, read_parquet
from agentrl.extras.datatools.arithmetic import write_arithmetic
from agentrl.tracking.metrics import read_metrics
from parts.learner import write_tiny_model

HERE = Path(__file__).parent
CONFIG = """
data:
  train_files: [{folder}/data/train.parquet]
  max_prompt_tokens: 256
model:
  path: {folder}/model
  chat_template: {folder}/site/stranger/at.jinja
agent:
  tools: [calculator]
  max_turns: 2
  max_response_tokens: 64
  max_turn_tokens: 16
rollout:
  group_size: 2
  max_concurrent_trajectories: 16
  weights:
    transport: kept
buffer:
  groups_per_step: 4
  stall_timeout_s: 120
algorithm:
  advantage: better
  policy_loss: powered
  loss_options: {{power: 2.0}}
learner:
  microbatch_tokens: 512
trainer:
  run_dir: {folder}/run
  steps: 2
  save_freq: 2
  logger: [console, text]
tracking:
  report: false
"""


def write_model_that_calls(folder: Path) -> None:
    """Write a random model that samples the mark of a call more often than any other token."""
    chat = Chat.load(str(folder))
    write_tiny_model(folder, chat.vocab_size)
    [mark] = chat.encode("@")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings[:, 0] = 1.0
        embeddings[mark, 0] = 2.0
    model.save_pretrained(folder)


class Stranger:
    """A world in which the package is installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        site = folder / "site"
        shutil.copytree(HERE / "stranger", site / "stranger")
        info = site / "stranger-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
        shutil.copy(HERE / "entry_points.txt", info)
        self._environment = {**os.environ, "PYTHONPATH": str(site), "NO_COLOR": "1", "COLUMNS": "200"}
        write_tiny_tokenizer(folder / "model")
        write_model_that_calls(folder / "model")
        write_arithmetic(folder / "data", seed=0, num_train=40, num_val=3, num_sft=8)
        self.config = folder / "config.yaml"
        self.config.write_text(CONFIG.format(folder=folder))

    def agentrl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "agentrl.cli", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, env=self._environment, timeout=240, check=False
        )


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Stranger:
    return Stranger(tmp_path_factory.mktemp("seams"))


@pytest.fixture(scope="module")
def run(stranger: Stranger) -> Path:
    trained = stranger.agentrl("train", str(stranger.config))
    assert trained.returncode == 0, trained.stdout + trained.stderr
    return stranger.folder / "run"


def test_the_listener_is_told_of_everything_in_order(run: Path) -> None:
    assert (run / "diary.txt").read_text().splitlines() == [
        "open None",
        "start 0",
        "begin",
        "publish 0",
        "publish 1",
        "step 1",
        "publish 2",
        "step 2",
        "checkpoint 2",
        "finish",
        "end",
        "close None",
    ]
    records = read_metrics(run / "metrics.jsonl")
    assert [record.values["diary/attempts"] for record in records if record.kind == "train"] == [8.0, 8.0]


def test_the_transport_carried_every_version(run: Path) -> None:
    assert [line for file in run.rglob("sent.txt") for line in file.read_text().split()] == ["0", "1", "2"]


def test_the_tracker_got_every_step(run: Path) -> None:
    written = [line.split() for line in (run / "rewards.txt").read_text().splitlines()]
    records = [record for record in read_metrics(run / "metrics.jsonl") if record.kind == "train"]
    assert [(int(step), float(reward)) for step, reward in written] == [
        (record.step, record.values["rollout/reward_mean"]) for record in records
    ]


def test_calls_are_read_in_the_format(run: Path) -> None:
    """The model writes the mark again and again; no other format would read a call there."""
    attempts = [t for file in run.glob("trajectories/*.parquet") for t in decode(read_parquet(file))]
    calls = [call for attempt in attempts for message in attempt.messages for call in message.tool_calls]
    assert calls
    assert all(call.error for call in calls if call.arguments is None)


def test_the_loss_and_the_estimator_made_the_updates(stranger: Stranger, run: Path) -> None:
    """Two updates on policy: the loss is -A rho^2, so its gradient is twice that of the plain ratio."""
    records = [record for record in read_metrics(run / "metrics.jsonl") if record.kind == "train"]
    assert all(record.values["learner/ratio_max"] > 0 for record in records)
    explained = stranger.agentrl("config", "explain", str(stranger.config))
    assert explained.returncode == 0, explained.stderr
    assert "powered, rho^2" in explained.stdout
    assert "better over groups of 2" in explained.stdout


def test_the_end_of_the_run_tells_the_notes_and_where_one_failed(run: Path) -> None:
    summary = (run / "summary.md").read_text()
    assert "diary: 16 attempts" in summary
    assert (
        "notes 'lost' of package 'stranger' failed: ZeroDivisionError: no such world (closing.py:13)"
        in summary
    )


def test_a_config_of_its_own_command_is_checked_and_shown(stranger: Stranger) -> None:
    config = stranger.folder / "walk.yaml"
    config.write_text("")
    shown = stranger.agentrl("config", "show", str(config), "steps=5", "--for=walk")
    assert shown.stdout.strip() == "steps: 5", shown.stderr
    assert (
        "known: rm, sft, train, walk" in stranger.agentrl("config", "show", str(config), "--for=run").stderr
    )
    explained = stranger.agentrl("config", "explain", str(config), "--for=walk")
    assert "--for=walk: there is no explanation of its configs" in explained.stderr


def test_the_command_reads_the_run(stranger: Stranger, run: Path) -> None:
    said = stranger.agentrl("longest", str(run))
    assert said.returncode == 0, said.stderr
    assert int(said.stdout) > 0
    assert "longest" in stranger.agentrl("--help").stdout


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("algorithm.loss_options={power: -1}", "loss_options.power: Input should be greater than 0"),
        (
            "algorithm.loss_options={powr: 1}",
            "loss_options.powr: Extra inputs are not permitted; powered takes power",
        ),
        (
            "rollout.weights.transport=pigeon",
            "unknown transport 'pigeon'; use one of disk, distributed, kept",
        ),
        ("model.tool_format=an", "unknown tool format 'an'; use one of auto, "),
        ("rollout.weights.delta=true", "only transport=disk sends deltas"),
        ("trainer.logger=[texts]", "unknown tracker 'texts'; use one of console, "),
    ],
)
def test_a_wrong_name_or_option_is_answered_in_one_line(stranger: Stranger, override: str, line: str) -> None:
    refused = stranger.agentrl("train", str(stranger.config), override)
    assert refused.returncode == 2
    assert line in refused.stderr + refused.stdout
    assert "Traceback" not in refused.stderr + refused.stdout
