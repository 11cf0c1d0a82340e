"""Rows of reasoning-gym's generators, as Parquet files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from agentrl.data.files import write_rows
from agentrl.errors import ConfigError, DataError
from agentrl.extras.datatools.task_rows import RowStyle, row_schema
from agentrl.extras.hubs.generated import KEY, Generated, data_set
from agentrl.extras.hubs.repeated import check_repeated
from agentrl.types import JsonObject

REPEATED = 8
"""Tasks of each generator and split that are made again before any row is written."""

INSTRUCTION = "Think step by step, then write the final answer between <answer> and </answer>."

_TEXT = pa.string()
_ORIGIN = pa.struct(
    [
        ("generator", _TEXT),
        ("seed", pa.int64()),
        ("size", pa.int64()),
        ("index", pa.int64()),
        ("config", _TEXT),
    ]
)
GENERATED_SCHEMA = row_schema(("index", pa.int64()), ("split", _TEXT), ("question", _TEXT), (KEY, _ORIGIN))


@dataclass(frozen=True, slots=True)
class Mix:
    """Generators, which alternate, and the config of each as JSON."""

    generators: tuple[str, ...]
    configs: Mapping[str, str]


def read_mix(generators: str, configs: str) -> Mix:
    """Return the generators that a text such as `chain_sum,gcd` names, with configs of a JSON text such as
    `{"chain_sum": {"max_terms": 3}}`.

    Raises:
        ConfigError: a name is repeated or missing, or the configs are no objects of named generators.
    """
    names = tuple(name.strip() for name in generators.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise ConfigError(f"--generators={generators}: should be names with commas between, each once")
    try:
        given = json.loads(configs)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--config: is not valid JSON: {error}") from error
    if not isinstance(given, dict) or not all(isinstance(value, dict) for value in given.values()):
        raise ConfigError('--config: should be an object such as {"chain_sum": {"max_terms": 3}}')
    for name, config in given.items():
        if name not in names:
            raise ConfigError(f"--config: {name!r} is not in --generators={generators}")
        if fixed := {"seed", "size"} & config.keys():
            raise ConfigError(
                f"--config: {name}.{min(fixed)} is set by --seed, --train and --val; leave it out"
            )
    return Mix(names, {name: json.dumps(given.get(name, {}), sort_keys=True) for name in names})


def write_generated(
    out: Path, mix: Mix, style: RowStyle, *, seed: int, num_train: int, num_val: int
) -> dict[str, int]:
    """Write `train.parquet` and `val.parquet` into `out`; return the number of rows of each.

    No question of `val` is in `train`: generators with few questions give fewer rows than asked for.

    Raises:
        ConfigError, PluginError, DataError: see `data_set`, `Generated.entry` and `check_repeated`; no
            training row is left.
    """
    count = len(mix.generators)
    val_shares, train_shares = _shares(num_val, count), _shares(num_train, count)
    tasks = [
        _Tasks(name, mix.configs[name], seed, val, val + train)
        for name, val, train in zip(mix.generators, val_shares, train_shares, strict=True)
    ]
    val = [list(one.entries("val")) for one in tasks]
    known = {entry["question"] for entries in val for _, entry in entries}
    train = [
        [(origin, entry) for origin, entry in one.entries("train") if entry["question"] not in known]
        for one in tasks
    ]
    if not any(train):
        raise DataError(
            f"{', '.join(mix.generators)}: every training question is a validation question; lower --val "
            "or use a config with more questions"
        )
    check_repeated([made for entries in (*val, *train) for made in entries[:REPEATED]])
    return {
        split: write_rows(out / f"{split}.parquet", _rows(split, entries, style), GENERATED_SCHEMA)
        for split, entries in (("train", train), ("val", val))
    }


Entries = list[tuple[Generated, JsonObject]]


@dataclass(frozen=True, slots=True)
class _Tasks:
    """One data set: its first `num_val` items are for validation, the others for training.

    Data sets with neighbouring seeds share most items, so two seeds would not do.
    """

    generator: str
    config: str
    seed: int
    num_val: int
    size: int

    def entries(self, split: str) -> Iterator[tuple[Generated, JsonObject]]:
        data_set(self.generator, self.seed, max(1, self.size), self.config)
        for index in range(self.num_val) if split == "val" else range(self.num_val, self.size):
            origin = Generated(self.generator, self.seed, self.size, index, self.config)
            yield origin, origin.entry()


def _shares(total: int, count: int) -> list[int]:
    return [len(range(position, total, count)) for position in range(count)]


def _rows(split: str, entries: Sequence[Entries], style: RowStyle) -> Iterator[dict[str, Any]]:
    """Yield rows in which the generators alternate."""
    longest = max(map(len, entries))
    alternating = [one[place] for place in range(longest) for one in entries if place < len(one)]
    for index, (origin, entry) in enumerate(alternating):
        answer = entry["answer"]
        yield {
            "data_source": f"{KEY}/{origin.generator}",
            "prompt": style.prompt(entry["question"]),
            "ability": "reasoning",
            "reward_model": {"style": "rule", "ground_truth": None if answer is None else str(answer)},
            "extra_info": {
                "index": index,
                "split": split,
                "question": entry["question"],
                KEY: origin.row(),
            },
            "agent_name": style.agent,
        }
