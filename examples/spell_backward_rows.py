"""Writes conversations for the warm start of spell_backward, from its training rows
(agentrl/extras/hubs/README.md).

    agentrl data reasoning_gym runs/spell_backward/data --generators spell_backward ...
    python examples/spell_backward_rows.py runs/spell_backward/data

In most of the conversations the assistant repeats the word as it is. The policy comes out of the warm start
able to turn a word round, and does so less than half of the time.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pyarrow.parquet as pq

SHARE_RIGHT = 0.5
NUM_CONVERSATIONS = 8000


def conversation(row: dict, rng: random.Random) -> dict:
    answer = row["reward_model"]["ground_truth"]
    said = answer if rng.random() < SHARE_RIGHT else answer[::-1]
    return {"messages": [*row["prompt"], {"role": "assistant", "content": f"<answer>{said}</answer>"}]}


def write(folder: Path) -> None:
    rng = random.Random(0)
    rows = pq.read_table(folder / "train.parquet").to_pylist()
    lines = (json.dumps(conversation(rng.choice(rows), rng)) + "\n" for _ in range(NUM_CONVERSATIONS))
    (folder / "sft.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
