"""Writes conversations for the warm start of the ladder (agentrl/extras/hubs/README.md).

    python examples/ladder_rows.py runs/ladder/data

Seven of ten moves go the right way. The policy comes out of the warm start able to play, and not well.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

SHARE_RIGHT = 0.7
MAX_STEPS = 4
NUM_CONVERSATIONS = 4000


def conversation(rng: random.Random) -> dict:
    rung = rng.randint(1, 9)
    goal = rng.choice([other for other in range(max(1, rung - 3), min(9, rung + 3) + 1) if other != rung])
    messages = [{"role": "user", "content": f"on {rung}, to {goal}"}]
    for _ in range(MAX_STEPS):
        up = (goal > rung) == (rng.random() < SHARE_RIGHT)
        rung += 1 if up else -1
        messages.append({"role": "assistant", "content": "up" if up else "down"})
        if rung == goal:
            break
        messages.append({"role": "user", "content": f"on {rung}, to {goal}"})
    if messages[-1]["role"] == "user":
        messages.pop()
    return {"messages": messages}


def write(folder: Path) -> None:
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(conversation(rng)) + "\n" for _ in range(NUM_CONVERSATIONS))
    (folder / "sft.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
