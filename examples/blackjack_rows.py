"""Writes conversations for the warm start of Blackjack (docs/hubs.md).

    python examples/blackjack_rows.py runs/blackjack/data

Seven of ten actions are sensible: hit below 17, stick from 17 on. The policy comes out of the warm start able
to play, and not well.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from agentrl.hubs.gymnasium_game import GymnasiumGame, OpenGame
from agentrl.plugins import environment_tools

GAME = "Blackjack-v1"
FIRST_SEED = 1_000_000  # no row of `agentrl data gymnasium` has it
NUM_CONVERSATIONS = 4000
SHARE_SENSIBLE = 0.7
ENOUGH = 17


def conversation(seed: int, rng: random.Random, schema: dict[str, Any]) -> dict[str, Any]:
    game = OpenGame(GAME, seed, "{}")
    messages: list[dict[str, Any]] = [{"role": "user", "content": game.seen}]
    while not game.is_over:
        sum_of_cards = int(game.seen.strip("(").split(",")[0])
        hits = (sum_of_cards < ENOUGH) == (rng.random() < SHARE_SENSIBLE)
        action = "hit" if hits else "stick"
        function = {"name": "act", "arguments": json.dumps({"action": action})}
        call = {"id": "call00000", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": game.act(action), "tool_call_id": "call00000", "name": "act"},
        ]
    game.close()
    return {"messages": messages[:-1], "tools": [schema]}


def write(folder: Path) -> None:
    rng, schema = random.Random(0), environment_tools(GymnasiumGame)["act"]().schema()
    folder.mkdir(parents=True, exist_ok=True)
    seeds = range(FIRST_SEED, FIRST_SEED + NUM_CONVERSATIONS)
    lines = (json.dumps(conversation(seed, rng, schema)) + "\n" for seed in seeds)
    (folder / "sft.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
