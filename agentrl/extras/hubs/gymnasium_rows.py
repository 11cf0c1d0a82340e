"""Rows of Gymnasium's games, as Parquet files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from agentrl.data.files import write_rows
from agentrl.errors import ConfigError
from agentrl.extras.datatools.task_rows import RowStyle, row_schema
from agentrl.extras.hubs.gymnasium_game import KEY, OpenGame
from agentrl.extras.hubs.gymnasium_text import text_of

INSTRUCTION = "Play the game to its end: take one action at a time with the tool act."

_TEXT = pa.string()
_WORLD = pa.struct([("name", _TEXT), ("game", _TEXT), ("seed", pa.int64()), ("options", _TEXT)])
GAME_SCHEMA = row_schema(("index", pa.int64()), ("split", _TEXT), ("environment_kwargs", _WORLD))


def read_games(games: str, options: str) -> dict[str, str]:
    """Return the options (JSON) of each game that a text such as `FrozenLake-v1,Taxi-v4` names. options: JSON
    such as `{"FrozenLake-v1": {"is_slippery": false}}`.

    Raises:
        ConfigError: a name is repeated or missing, or the options are no objects of named games.
    """
    names = [name.strip() for name in games.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise ConfigError(f"--games={games}: should be ids with commas between, each once")
    try:
        given = json.loads(options)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--options: is not valid JSON: {error}") from error
    if not isinstance(given, dict) or not all(isinstance(value, dict) for value in given.values()):
        raise ConfigError('--options: should be an object such as {"FrozenLake-v1": {"is_slippery": false}}')
    if strange := sorted(given.keys() - set(names)):
        raise ConfigError(f"--options: {strange[0]!r} is not in --games={games}")
    return {name: json.dumps(given.get(name, {}), sort_keys=True) for name in names}


@dataclass(frozen=True, slots=True)
class GameRows:
    """What becomes rows: games by their options (JSON), which alternate, from a first seed on.

    has_rules: the prompt has the rules and the names of the actions, not only the first state.
    """

    games: Mapping[str, str]
    style: RowStyle
    seed: int
    num_train: int
    num_val: int
    has_rules: bool = True


def write_games(out: Path, rows: GameRows) -> dict[str, int]:
    """Write `train.parquet` and `val.parquet` into `out`; return the number of rows of each.

    The seeds of `val` come first, those of `train` after them.

    Raises:
        DataError, PluginError: see `OpenGame`; no training row is left.
    """
    starts = {"val": (rows.seed, rows.num_val), "train": (rows.seed + rows.num_val, rows.num_train)}
    written = {
        split: write_rows(out / f"{split}.parquet", _rows(split, rows, first, count), GAME_SCHEMA)
        for split, (first, count) in starts.items()
    }
    return {"train": written["train"], "val": written["val"]}


def _rows(split: str, rows: GameRows, first: int, count: int) -> Iterator[dict[str, Any]]:
    names: Sequence[str] = list(rows.games)
    for index in range(count):
        game = names[index % len(names)]
        seed, options = first + index, rows.games[game]
        yield {
            "data_source": f"{KEY}/{game}",
            "prompt": rows.style.prompt(_question(game, seed, options, has_rules=rows.has_rules)),
            "ability": "game",
            "reward_model": {"style": "rule", "ground_truth": None},
            "extra_info": {
                "index": index,
                "split": split,
                "environment_kwargs": {"name": KEY, "game": game, "seed": seed, "options": options},
            },
            "agent_name": rows.style.agent,
        }


def _question(game: str, seed: int, options: str, *, has_rules: bool) -> str:
    begun = OpenGame(game, seed, options)
    try:
        rules = text_of(game).rules or f"You play {game}."
        return f"{rules}\nEach action is {begun.actions}.\n\n{begun.seen}" if has_rules else begun.seen
    finally:
        begun.close()
