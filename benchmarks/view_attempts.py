"""How long the page's table takes over a million attempts, and how much memory: `agentrl view` without a
browser.

Synthetic files as a run writes them: one per step, each attempt with its tokens, messages and metrics. Every
question is asked of a fresh process (cold: nothing read yet, but for the disk's cache), and again (warm).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.data.trajectories import SCHEMA
from agentrl.extras.view.attempts import AttemptTable, Filters
from agentrl.extras.view.sources import open_sources

QUESTIONS: dict[str, dict[str, Any]] = {
    "first table": {},
    "one step": {"conditions": {"step": "40"}},
    "outcome": {"conditions": {"outcome": "truncated"}},
    "reward below 0.5": {"conditions": {"reward": "..0.5"}},
    "turns and calls": {"conditions": {"turns": "3", "calls": "1.."}},
    "task": {"conditions": {"task": "train:123"}},
    "sorted by reward": {"sort": "-reward"},
    "words in the conversation": {"conditions": {"text": "needle"}},
}
WANTED_S = {"first table": 1.0, "words in the conversation": 1e9}
"""Seconds, of the first answer; 2.0 of the others. Words are searched file by file while the page shows what
was found.
"""
WANTED_BYTES = 300 * 10**6


def write_files(folder: Path, num_files: int, rows: int, tokens: int) -> None:
    """Write files like those of a run's steps."""
    place = folder / "trajectories"
    place.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for step in range(1, num_files + 1):
        table = pa.Table.from_batches([_step(rng, step, rows, tokens)])
        table = table.add_column(0, "step", pa.array(np.full(rows, step)))
        table = table.add_column(1, "learned_by", pa.array(np.full(rows, step - 1)))
        pq.write_table(table, place / f"step_{step:06d}.parquet", compression="zstd")


def _step(rng: np.random.Generator, step: int, rows: int, tokens: int) -> pa.RecordBatch:
    offsets = pa.array(np.arange(rows + 1) * tokens)
    mask = np.tile(np.arange(tokens) >= tokens // 3, rows)
    reward = rng.integers(0, 2, rows).astype(float)
    turns = rng.integers(1, 4, rows).astype(float)
    names = ["num_turns", "num_tool_calls", "num_tool_errors", "generate_s", "tool_s", "accuracy"]
    values = np.stack(
        [turns, rng.integers(0, 3, rows), np.zeros(rows), rng.random(rows), rng.random(rows), reward], axis=1
    )
    said = [f"What is {step}+{row}?" for row in range(rows)]
    said[rows // 2] += " needle"
    message = {"tool_calls": [], "tool_call_id": None, "name": None, "reasoning": ""}
    messages = [
        [{"role": "user", "content": text, **message}, {"role": "assistant", "content": "#### 7", **message}]
        for text in said
    ]
    columns: dict[str, pa.Array] = {
        "group_id": pa.array(step * rows + np.arange(rows) // 8),
        "member": pa.array((np.arange(rows) % 8).astype(np.int32)),
        "task_id": pa.array([f"train:{(step * rows + row) // 8}" for row in range(rows)]),
        "data_source": pa.array(["arithmetic"] * rows),
        "agent_name": pa.array(["tool_agent"] * rows),
        "outcome": pa.array(np.array(["completed", "truncated", "turn_limit"])[rng.integers(0, 3, rows)]),
        "failure": pa.array([None] * rows, SCHEMA.field("failure").type),
        "extra_info": pa.array(["{}"] * rows, pa.large_string()),
        "is_greedy": pa.array(np.zeros(rows, bool)),
        "messages": pa.array(messages, SCHEMA.field("messages").type),
        "segment_starts": pa.array([[0]] * rows, SCHEMA.field("segment_starts").type),
        "rewards": pa.array(
            [[{"name": "arithmetic", "value": value, "position": tokens - 1}] for value in reward.tolist()],
            SCHEMA.field("rewards").type,
        ),
        "metrics": pa.array(
            [list(zip(names, line, strict=True)) for line in values.tolist()], SCHEMA.field("metrics").type
        ),
    }
    flat = {
        "token_ids": rng.integers(0, 300, rows * tokens).astype(np.int32),
        "action_mask": mask,
        "behavior_logprobs": np.where(mask, -rng.random(rows * tokens), 0).astype(np.float32),
        "versions": np.where(mask, max(0, step - 2), -1).astype(np.int32),
        "turn_ids": np.where(mask, 0, -1).astype(np.int16),
    }
    for name, array in flat.items():
        columns[name] = pa.LargeListArray.from_arrays(offsets, pa.array(array), type=SCHEMA.field(name).type)
    for field in SCHEMA:
        if field.name not in columns:  # lists that most attempts leave empty
            columns[field.name] = pa.array([[]] * rows, field.type)
    return pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def ask(folder: Path, question: str) -> dict[str, float]:
    """Answer one question in this process, twice."""
    table = AttemptTable(open_sources([folder])[0])
    spec = QUESTIONS[question]
    filters = Filters.parse(spec.get("conditions", {}))
    found: dict[str, float] = {}
    for way in ("cold", "warm"):
        began, cpu = time.perf_counter(), time.process_time()
        first = None
        while True:
            page = table.page(filters, sort=spec.get("sort", "newest"), limit=50)
            first = first or time.perf_counter() - began
            if page.is_complete:
                break
        found |= {
            f"{way}_first_answer_s": first,
            f"{way}_s": time.perf_counter() - began,
            f"{way}_cpu_s": time.process_time() - cpu,
            "rows": page.total,
        }
    # not ru_maxrss: a child begins with that of its parent
    status = Path("/proc/self/status").read_text().split()
    found["peak_rss_bytes"] = int(status[status.index("VmHWM:") + 1]) * 1024
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=1000, help="per file")
    parser.add_argument("--tokens", type=int, default=48, help="per attempt")
    parser.add_argument("--folder", type=Path, help="keep the files here, and use those that are there")
    parser.add_argument("--ask", help="answer one question about --folder as JSON (of this program itself)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.ask:
        print(json.dumps(ask(options.folder, options.ask)))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch) / "run"
        if not folder.exists():
            write_files(folder, options.files, options.rows, options.tokens)
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*.parquet"))
        answers = {}
        for question in QUESTIONS:
            command = [sys.executable, __file__, "--folder", str(folder), "--ask", question]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ})
            answers[question] = json.loads(done.stdout)
            print(question, {name: round(value, 3) for name, value in answers[question].items()}, flush=True)
    result = {
        "attempts": options.files * options.rows,
        "files": options.files,
        "tokens": options.tokens,
        "parquet_bytes": num_bytes,
        "questions": answers,
    }
    import machine  # loads torch, whose memory is not the page's

    machine.write_result(options.out, result)
    is_met = all(
        answer["cold_s"] <= WANTED_S.get(name, 2.0) and answer["peak_rss_bytes"] <= WANTED_BYTES
        for name, answer in answers.items()
    )
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
