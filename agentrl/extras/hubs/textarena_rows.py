"""Rows of TextArena's games, as Parquet files."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from agentrl.data.files import write_rows
from agentrl.errors import ConfigError
from agentrl.extras.datatools.task_rows import RowStyle, row_schema
from agentrl.extras.hubs.process import HubProcess
from agentrl.extras.hubs.textarena import KEY, Match, OpenMatch, TextArenaOptions, program_of

BY_TOOL = "Play the game to its end: take one action at a time with the tool act."
BY_TURNS = "Play the game to its end. Each of your messages is one action."

_TEXT = pa.string()
_WORLD = pa.struct(
    [
        *(("name", _TEXT), ("game", _TEXT), ("seed", pa.int64()), ("options", _TEXT)),
        *(("players", pa.int64()), ("seat", pa.int64()), ("opponent", _TEXT)),
    ]
)
TEXTARENA_SCHEMA = row_schema(
    ("index", pa.int64()),
    ("split", _TEXT),
    ("environment_kwargs", _WORLD),
    ("tool_selection", pa.list_(_TEXT)),
)


@dataclass(frozen=True, slots=True)
class MatchRows:
    """What becomes rows: games by their options (JSON), which alternate, from a first seed on.

    Attributes:
        players: number of seats; 0: the fewest that each game takes.
        opponents: by split ("train", "val"), who has the other seats; then the policy's seat alternates. In a
            split without one, the policy has all seats.
        by_turns: games for one player are played by turns, not by the tool `act`.
        system: the system message; None: how to play; "": none.
    """

    games: Mapping[str, str]
    seed: int
    num_train: int
    num_val: int
    players: int = 0
    opponents: Mapping[str, str] | None = None
    by_turns: bool = False
    system: str | None = None


def write_matches(out: Path, options: TextArenaOptions, rows: MatchRows) -> dict[str, int]:
    """Write `train.parquet` and `val.parquet` into `out`; return the number of rows of each.

    The seeds of `val` come first, those of `train` after them.

    Raises:
        ConfigError: the interpreter does not exist, or an opponent is named for a game of one player.
        DataError: see `OpenMatch.begin`.
        EnvironmentFailed: a game raised, or the process failed.
    """
    made = asyncio.run(_made(options, rows))
    written = {
        split: write_rows(out / f"{split}.parquet", iter(found), TEXTARENA_SCHEMA)
        for split, found in made.items()
    }
    return {"train": written["train"], "val": written["val"]}


async def _made(options: TextArenaOptions, rows: MatchRows) -> dict[str, list[dict[str, Any]]]:
    process = HubProcess(program_of(options))
    starts = {"val": (rows.seed, rows.num_val), "train": (rows.seed + rows.num_val, rows.num_train)}
    try:
        return {
            split: [await _row(process, options, rows, split, index, first) for index in range(count)]
            for split, (first, count) in starts.items()
        }
    finally:
        await process.close()


async def _row(
    process: HubProcess, options: TextArenaOptions, rows: MatchRows, split: str, index: int, first: int
) -> dict[str, Any]:
    game = list(rows.games)[index % len(rows.games)]
    match = Match(game, first + index, rows.games[game], rows.players)
    begun = OpenMatch(process)
    await begun.begin(match, options)
    await begun.close()
    opponent = (rows.opponents or {}).get(split)
    if opponent is not None and begun.num_players == 1:
        raise ConfigError(f"game {game!r} has one player; leave the opponent {opponent!r} out")
    # Games alternate fastest: each is played from all its seats.
    seat = None if opponent is None else index // len(rows.games) % begun.num_players
    by_tool = begun.num_players == 1 and not rows.by_turns
    system = (BY_TOOL if by_tool else BY_TURNS) if rows.system is None else rows.system
    agent = "tool_agent" if by_tool else KEY
    row = Match(game, match.seed, match.options, begun.num_players, seat, opponent)
    return {
        "data_source": f"{KEY}/{game}",
        "prompt": RowStyle(agent, system=system).prompt(begun.seen),
        "ability": "game",
        "reward_model": {"style": "rule", "ground_truth": None},
        "extra_info": {
            "index": index,
            "split": split,
            "environment_kwargs": {"name": KEY, **asdict(row)},
            "tool_selection": ["act"] if by_tool else [],
        },
        "agent_name": agent,
    }
