"""Writes conversations for the warm start of FrozenLake (agentrl/extras/hubs/README.md).

    python examples/lake_rows.py runs/lake/data

Six of ten moves are on a shortest way to the goal, the others go anywhere. The policy comes out of the warm
start able to walk, and seldom arrives.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from agentrl.extras.hubs.gymnasium_game import GymnasiumGame, OpenGame
from agentrl.plugins import environment_tools

GAME, OPTIONS = "FrozenLake-v1", '{"is_slippery": false}'
# A move on a shortest way by the place that the brackets mark; the goal and holes have none.
TO_GOAL = ("down right down left", "down - down -", "right down down -", "- right right -")
ACTIONS = ("left", "down", "right", "up")
SHARE_TO_GOAL = 0.6
MAX_MOVES = 10
NUM_CONVERSATIONS = 2000


def move(seen: str, rng: random.Random) -> str:
    rows = [line for line in seen.splitlines() if set(line) <= set("SFHG[]") and line]
    row, line = next((number, line) for number, line in enumerate(rows) if "[" in line)
    way = TO_GOAL[row].split()[line.index("[")]
    return way if rng.random() < SHARE_TO_GOAL else rng.choice(ACTIONS)


def conversation(rng: random.Random, schema: dict[str, Any]) -> dict[str, Any]:
    game = OpenGame(GAME, 0, OPTIONS)
    messages: list[dict[str, Any]] = [{"role": "user", "content": game.seen}]
    while not game.is_over and game.num_steps < MAX_MOVES:
        action = move(game.seen, rng)
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
    lines = (json.dumps(conversation(rng, schema)) + "\n" for _ in range(NUM_CONVERSATIONS))
    (folder / "sft.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
