"""Files of proximal log-probabilities, beside the trajectories that they belong to (`tracking.token_ratios`).

A rank writes one file per minibatch of a step, `proximal/step_000012_part0_rank3.parquet`. Each row is a run
of consecutive action tokens of an attempt: a sequence that is split over microbatches has several.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from agentrl.data.parquet_files import read_table, write_table

FOLDER = "proximal"
WHAT = "a Parquet file of log-probabilities"
_SCHEMA = pa.schema(
    [
        pa.field("group", pa.int64()),
        pa.field("member", pa.int32()),
        pa.field("first", pa.int32()),
        pa.field("logprobs", pa.list_(pa.float32())),
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class ProximalRun:
    """Log-probabilities (f32[n], nats) of the action tokens `first` to `first + n` of an attempt, counted
    among its action tokens.
    """

    group: int
    member: int
    first: int
    logprobs: NDArray[np.float32]


def write_proximal(folder: Path, runs: Iterable[ProximalRun], *, step: int, part: int, rank: int) -> None:
    """Write a rank's part of a step; one that is there, from before the run was set back, is replaced.

    Raises:
        OSError: the file could not be written.
    """
    rows = [{"group": r.group, "member": r.member, "first": r.first, "logprobs": r.logprobs} for r in runs]
    table = pa.Table.from_pylist(rows, schema=_SCHEMA)
    write_table(table, folder / f"step_{step:06d}_part{part}_rank{rank}.parquet")


def read_proximal(
    folder: Path, *, step: int, group: int, member: int, num_actions: int
) -> NDArray[np.float32] | None:
    """Return the proximal log-probabilities of an attempt's action tokens, f32[num_actions].

    NaN where none is stored; None if the step stored nothing of the attempt.

    Files that are gone meanwhile count as absent.

    Raises:
        DataError: a file is damaged.
    """
    wanted = (pc.field("group") == group) & (pc.field("member") == member)
    found = np.full(num_actions, math.nan, np.float32)
    is_any = False
    for path in sorted(folder.glob(f"step_{step:06d}_part*_rank*.parquet")):
        try:
            rows = read_table(path, WHAT, schema=_SCHEMA, filters=wanted).to_pylist()
        except FileNotFoundError:
            continue
        for row in rows:
            own = np.asarray(row["logprobs"], np.float32)[: max(0, num_actions - row["first"])]
            found[row["first"] : row["first"] + len(own)] = own
            is_any = True
    return found if is_any else None


def groups_of_step(folder: Path, step: int) -> set[int]:
    """Return the groups of which files of a step store something.

    Raises:
        DataError: a file is damaged.
    """
    files = folder.glob(f"step_{step:06d}_part*_rank*.parquet")
    tables = [read_table(file, WHAT, columns=["group"]) for file in files]
    return {group for table in tables for group in table["group"].to_pylist()}
