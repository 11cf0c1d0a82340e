"""Write selected rows of a file to another file; all columns and their types are preserved."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.data.atomic_files import appearing_whole
from agentrl.data.files import open_rows
from agentrl.data.pass_rates import first_user_text
from agentrl.data.prepare import Written
from agentrl.data.rows import RowPlace
from agentrl.data.selection import Candidate, Selection, normalise, select
from agentrl.errors import DataError


def filter_rows(file: Path, out: Path, selection: Selection) -> Written:
    """Write the rows of `file` that `selection` keeps to `out`, atomically.

    Raises:
        DataError: a row has no prompt of chat messages, or no row is left. Nothing was written.
    """
    rows = open_rows(str(file))
    candidates = [
        _candidate(raw, RowPlace(str(file), file.stem, index, rows.line(index))) for index, raw in enumerate(rows.rows(len(rows)))
    ]
    kept, notes = select(candidates, selection)
    if file.suffix == ".parquet":
        places = {id(candidate): index for index, candidate in enumerate(candidates)}
        table = pq.read_table(file).take([places[id(candidate)] for candidate in kept])
    else:
        try:
            table = pa.Table.from_pylist([dict(candidate.row) for candidate in kept])
        except pa.ArrowInvalid as error:
            raise DataError(f"{file}: its rows do not fit into columns of one type each: {error}") from error
    with appearing_whole(out) as partial:
        pq.write_table(table, partial, compression="zstd")
    return Written({out.stem: len(kept)}, tuple(notes))


def _candidate(raw: dict, place: RowPlace) -> Candidate:
    prompt = raw.get("prompt")
    if not isinstance(prompt, list) or not all(isinstance(message, dict) and "role" in message for message in prompt):
        raise place.error("prompt", f"must be a list of {{role, content}}, is {str(prompt)[:80]!r}")
    question = (raw.get("extra_info") or {}).get("question")
    text = normalise(question if isinstance(question, str) else first_user_text(prompt))
    answer = str((raw.get("reward_model") or {}).get("ground_truth"))
    # The whole file counts as train: held-out splits would be exempt from the difficulty filter.
    return Candidate(raw, "train", question=text, identity=text, answer=answer)
