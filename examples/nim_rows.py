"""Writes the rows of Nim: self-play to train on, games against an opponent, and moves to imitate.

    python examples/nim_rows.py runs/nim/data

The moves to imitate are legal and random: the policy comes out of the warm start able to play, and no better
than chance.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

PILES = range(4, 10)  # who moves first against a frozen model cannot end the game at once
SIDES = ("first", "second")
NUM_ROWS = 512
NUM_CONVERSATIONS = 2048


def row(stones: int, **extra: Any) -> dict[str, Any]:
    return {
        "data_source": "nim",
        "prompt": [{"role": "user", "content": str(stones)}],
        "agent_name": "nim",
        "reward_model": {"ground_truth": ""},
        "extra_info": {"environment_kwargs": {"name": "pile", "stones": stones}, **extra},
    }


def against(opponent: str, number: int) -> list[dict[str, Any]]:
    """Return rows against an opponent, of all piles and both sides alike."""
    kinds = [(stones, side) for stones in PILES for side in SIDES]
    return [
        row(stones, side=side, opponent=opponent)
        for stones, side in (kinds * (number // len(kinds) + 1))[:number]
    ]


def conversation(rng: random.Random) -> dict[str, Any]:
    """Return one side of a game of random legal moves."""
    stones, messages = rng.choice(PILES) - rng.randrange(4), []
    while stones > 0:
        taken = rng.randint(1, min(3, stones))
        messages += [{"role": "user", "content": str(stones)}, {"role": "assistant", "content": str(taken)}]
        stones -= taken + rng.randint(1, 3)
    return {"messages": messages}


def write(folder: Path) -> None:
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    frozen = against("frozen", NUM_ROWS)
    rng.shuffle(frozen)
    files = {
        "selfplay.jsonl": [row(rng.choice(PILES)) for _ in range(NUM_ROWS)],
        "against.jsonl": frozen,
        "val.jsonl": against("frozen", 12 * 16),
        "sft.jsonl": [conversation(rng) for _ in range(NUM_CONVERSATIONS)],
        "past.jsonl": rng.sample(against("past", NUM_ROWS), NUM_ROWS),
    }
    for name, rows in files.items():
        (folder / name).write_text("".join(f"{json.dumps(one)}\n" for one in rows))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
