"""Pass rates of questions in earlier attempts, read from the Parquet files of a run or an evaluation."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.data.parquet_files import open_parquet, reading_parquet
from agentrl.data.row_values import structure
from agentrl.data.trajectories import WHAT, check_schema
from agentrl.errors import DataError
from agentrl.extras.datatools.selection import Candidate, normalise
from agentrl.types import SCORED_OUTCOMES

_COLUMNS = ["outcome", "metrics", "rewards", "extra_info", "messages"]


@dataclass(frozen=True)
class PassRates:
    """The share of right attempts, in [0, 1], for each question.

    Keyed by the question, not by the task id: an id is a position in a file, and differs if the same row is
    in another file.
    """

    accuracies: Mapping[str, Sequence[float]]

    def of(self, candidate: Candidate) -> float | None:
        """Return the pass rate of a row; None if its question was never asked."""
        for text in (candidate.question, normalise(first_user_text(structure(candidate.row["prompt"])))):
            if found := self.accuracies.get(text):
                return sum(found) / len(found)
        return None


def read_pass_rates(path: Path) -> PassRates:
    """Read the pass rates of questions from stored trajectories.

    `path` is a Parquet file, or a folder: its `attempts.parquet` is read, or else all its Parquet files. An
    attempt counts with its unshaped accuracy; if its reward reports none, it is right if the sum of its
    rewards is positive. Attempts that failed, or that no reward has scored, do not count.

    Raises:
        DataError: there is no such file, it contains no trajectories, or none of them was scored.
    """
    results = path / "attempts.parquet"
    files = [path] if path.is_file() else [results] if results.is_file() else sorted(path.rglob("*.parquet"))
    if not files:
        raise DataError(
            f"{str(path)!r}: no Parquet file of attempts; give one that an evaluation or a run has written"
        )
    accuracies: defaultdict[str, list[float]] = defaultdict(list)
    for row in (row for file in files for row in _rows(file)):
        accuracy = _accuracy(row)
        if accuracy is not None:
            accuracies[normalise(_question(row))].append(accuracy)
    if not accuracies:
        raise DataError(f"{str(path)!r}: no attempt in it has a score")
    return PassRates(accuracies)


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    with reading_parquet(file, WHAT), open_parquet(file, WHAT) as parquet:
        check_schema(parquet.schema_arrow, str(file))
        for batch in parquet.iter_batches(batch_size=256, columns=_COLUMNS):
            yield from batch.to_pylist()


def _accuracy(row: Mapping[str, Any]) -> float | None:
    metrics, rewards = dict(row["metrics"]), row["rewards"]
    is_scored = bool(rewards) or any(name == "accuracy" or name.startswith("reward/") for name in metrics)
    if row["outcome"] not in SCORED_OUTCOMES or not is_scored:
        return None
    return float(metrics.get("accuracy", sum(event["value"] for event in rewards) > 0))


def _question(row: Mapping[str, Any]) -> str:
    question = json.loads(row["extra_info"]).get("question")
    return question if isinstance(question, str) else first_user_text(row["messages"])


def first_user_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the first user message; "" if there is none."""
    return next((str(message["content"]) for message in messages if message.get("role") == "user"), "")
