"""A whole run on this machine: its folder, its commands, what they left running."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from agentrl.chat.chat import Chat
from agentrl.chat.tiny import write_tiny_tokenizer

MARK = "AGENTRL_TEST_MARK"
"""Environment variable by which the processes that a command started are found, wherever they went."""


@dataclass(frozen=True)
class Records:
    """metrics.jsonl of a run."""

    train: list[dict]
    validation: list[dict]


@dataclass
class Command:
    """An `agentrl` command running in the background."""

    process: subprocess.Popen
    mark: str
    log: Path = field(repr=False)

    def output(self) -> str:
        return self.log.read_text()

    def wait(self, timeout_s: float = 180) -> int:
        """Return the exit status; a command that takes longer is ended with all it started, and the test
        fails.
        """
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        """kill -9 the command and all it started."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def wait_until(self, condition, timeout_s: float = 120) -> None:
        """Poll until `condition()`; fail with the output when the command ends before."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the command ended early:\n{self.output()}"
            assert time.monotonic() < deadline, f"not within {timeout_s} s:\n{self.output()}"
            time.sleep(0.1)

    def processes(self) -> list[psutil.Process]:
        """Return the living processes that the command started, itself included."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.AccessDenied, psutil.NoSuchProcess):
                continue
        return found

    def left_behind(self, grace_s: float = 20) -> list[list[str]]:
        """Return the command lines of what still runs after a grace time: Ray's workers need a moment to
        notice the end.
        """
        deadline = time.monotonic() + grace_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [command_line(process) for process in left]

    def kill_one(self, words: str) -> int:
        """kill -9 the first process whose command line contains `words`; return its pid."""
        process = next(p for p in self.processes() if words in " ".join(command_line(p)))
        process.kill()
        return process.pid


def command_line(process: psutil.Process) -> list[str]:
    """Return the command line, [] of a process that has just ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


@dataclass(frozen=True)
class World:
    """A folder with a model, data and a config."""

    folder: Path
    config: Path
    commands: list[Command] = field(default_factory=list)

    def start(self, *arguments: str) -> Command:
        """Start `agentrl ARGUMENTS` in the background."""
        mark = uuid.uuid4().hex
        log = self.folder / f"{mark}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "agentrl.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, MARK: mark},
            )
        self.commands.append(Command(process, mark, log))
        return self.commands[-1]

    def write_rows(self, folder: Path, agents: Mapping[int, str], *, default: str | None = None) -> Path:
        """Write the first training rows, some of them for other agents; `default`: of all others, None: each
        keeps its own.
        """
        rows = pq.read_table(self.folder / "data/train.parquet").slice(0, 40)
        names = [agents.get(row, default or name) for row, name in enumerate(rows["agent_name"].to_pylist())]
        path = folder / "train.parquet"
        pq.write_table(
            rows.set_column(
                rows.schema.get_field_index("agent_name"), "agent_name", pa.array(names, pa.string())
            ),
            path,
        )
        return path

    def records(self, run_dir: Path) -> Records:
        path = run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return Records(
            [r for r in records if r["kind"] == "train"], [r for r in records if r["kind"] == "validation"]
        )

    def num_steps(self, run_dir: Path) -> int:
        return len(self.records(run_dir).train)


@contextlib.contextmanager
def ended_commands(world: World) -> Iterator[None]:
    """End what a failed test had started: the tests after it need the cores."""
    num_before = len(world.commands)
    yield
    for command in world.commands[num_before:]:
        if command.process.poll() is None:
            command.kill()


def write_tiny_model(folder: Path) -> None:
    """Write a random Qwen2 of 2 x 32 with the byte-level tokenizer."""
    write_tiny_tokenizer(folder)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = Qwen2Config(
        vocab_size=Chat.load(str(folder)).vocab_size,
        max_position_embeddings=1024,
        initializer_range=0.1,
        tie_word_embeddings=True,
        **sizes,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
