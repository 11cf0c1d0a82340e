"""Writes conversations for the warm start of larger_number (agentrl/extras/hubs/README.md).

    python examples/larger_number_rows.py runs/larger_number/data

Three of five answers name the larger number. The policy comes out of the warm start able to repeat a number,
and not sure which.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

SHARE_RIGHT = 0.6
NUM_CONVERSATIONS = 8000


def conversation(rng: random.Random) -> dict:
    one, other = rng.sample(range(10, 100), 2)
    said = (max if rng.random() < SHARE_RIGHT else min)(one, other)
    question = {"role": "user", "content": f"{one} or {other}?"}
    return {"messages": [question, {"role": "assistant", "content": str(said)}]}


def write(folder: Path) -> None:
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(conversation(rng)) + "\n" for _ in range(NUM_CONVERSATIONS))
    (folder / "sft.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
