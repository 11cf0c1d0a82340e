"""`failures.parquet`: one row per failed attempt of a run or an evaluation.

Repeated texts are stored once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from agentrl.data.parquet_files import read_table, reading_parquet, write_table
from agentrl.errors import CheckpointError, DataError
from agentrl.tracking.attempts import FailedAttempt
from agentrl.tracking.failures import FailureTally
from agentrl.tracking.redact import redact
from agentrl.tracking.unwritten import UnwrittenFiles
from agentrl.types import Failure, Outcome, PluginId

FILE = "failures.parquet"
_TEXT = pa.dictionary(pa.int32(), pa.large_string())
SCHEMA = pa.schema(
    [
        pa.field("step", pa.int64()),  # number of steps completed by then
        pa.field("time", pa.timestamp("ms", tz="UTC")),
        pa.field("outcome", _TEXT),
        # Retried, replaced, masked, left_out, dropped, went_on; not_scored: in a validation or an evaluation
        pa.field("became", _TEXT),
        pa.field("kind", _TEXT),  # of the plugin; null, as is its name, if no plugin caused the failure
        pa.field("plugin", _TEXT),
        pa.field("error", _TEXT),
        pa.field("text", _TEXT),
        pa.field("place", _TEXT),
        pa.field("traceback", _TEXT),
        pa.field("task_id", _TEXT),
        pa.field("data_source", _TEXT),
        pa.field("agent_name", _TEXT),
        pa.field("group_id", pa.int64()),
        pa.field("member", pa.int64()),
        pa.field("version", pa.int64()),  # learner version when the group was leased
    ]
)
GROWTH_SHARE = 0.02
"""The whole file is rewritten each time. A long file is rewritten
only after growing by this share, or for the last time.
"""


class FailureTable:
    """The rows of the file, which is created with the first row. Unwritten rows are kept in memory."""

    def __init__(self, file: Path, *, keeps_earlier: bool) -> None:
        """Load the rows of the file, or remove it if not `keeps_earlier`.

        Raises:
            CheckpointError: the file is damaged.
            OSError: the file cannot be read or removed.
        """
        self._file = file
        self._rows: list[Mapping[str, Any]] = []
        self._table = SCHEMA.empty_table()
        if not keeps_earlier:
            file.unlink(missing_ok=True)
        elif file.exists():
            self._table = _read(file)

    def earlier(self) -> Iterator[FailedAttempt]:
        """Yield the attempts of the loaded rows."""
        return map(_attempt, self._table.to_pylist())

    def add(self, attempts: Sequence[FailedAttempt], *, step: int) -> None:
        self._rows += [_row(failed, step) for failed in attempts]

    def write(self, *, is_last: bool) -> None:
        """Write the file if there are enough new rows, or if this is the last time.

        Raises:
            OSError: the file cannot be written.
        """
        if not self._rows or (not is_last and len(self._rows) < GROWTH_SHARE * len(self._table)):
            return
        new = pa.Table.from_pylist(self._rows, schema=SCHEMA)
        self._table = pa.concat_tables([self._table, new]).unify_dictionaries().combine_chunks()
        self._rows = []
        write_table(self._table, self._file, compression="zstd")


def _read(file: Path) -> pa.Table:
    what = "a Parquet file of failures"
    try:
        with reading_parquet(file, what):
            return read_table(file, what).cast(SCHEMA)
    except DataError as error:
        raise CheckpointError(f"{error}; move it away to continue without its rows") from error


class FailureBook:
    """Reports failures, and stores them in `folder`. If a write fails, a later one writes everything."""

    def __init__(
        self,
        folder: Path,
        *,
        say: Callable[[str], None],
        unwritten: UnwrittenFiles,
        is_resumed: bool,
        shows_tracebacks: bool,
    ) -> None:
        self._unwritten = unwritten
        self._file = folder / FILE
        self.tally = FailureTally(say, where=str(self._file), shows_tracebacks=shows_tracebacks)
        self._table = FailureTable(self._file, keeps_earlier=is_resumed)
        self.tally.restore(self._table.earlier())

    def add(self, attempts: Sequence[FailedAttempt], *, step: int) -> None:
        """Record failures; `step`: number of steps completed so far."""
        if not attempts:
            return
        attempts = [_redacted(failed) for failed in attempts]
        self._table.add(attempts, step=step)
        self.tally.add(attempts)
        self.write()

    def write(self, *, is_last: bool = False) -> None:
        """Update the file."""
        self._unwritten.attempt(FILE, lambda: self._table.write(is_last=is_last))

    def lines(self) -> list[str]:
        """Return the most frequent failures in words, and the path of the file; [] if nothing failed."""
        return _lines(self.tally, self._file)


def failure_lines(file: Path) -> list[str]:
    """Return `FailureBook.lines` for an existing file of failures; [] if there is none."""
    tally = FailureTally(lambda text: None, where=str(file))
    tally.restore(FailureTable(file, keeps_earlier=True).earlier())
    return _lines(tally, file)


def _lines(tally: FailureTally, file: Path) -> list[str]:
    lines = tally.lines()
    return [*lines, f"all failures: {file}"] if lines else []


def _redacted(failed: FailedAttempt) -> FailedAttempt:
    """Redact secrets: an error may quote a URL, which may contain a user and password."""
    text = redact({"text": failed.failure.text})["text"]
    return (
        failed if text == failed.failure.text else replace(failed, failure=replace(failed.failure, text=text))
    )


def _row(failed: FailedAttempt, step: int) -> dict[str, Any]:
    failure = failed.failure
    plugin = failure.plugin
    texts = {
        "outcome": failed.outcome.value,
        "became": failed.became,
        "kind": None if plugin is None else plugin.kind,
        "plugin": None if plugin is None else plugin.name,
        **{name: getattr(failure, name) for name in ("error", "text", "place", "traceback")},
        **{name: getattr(failed, name) for name in ("task_id", "data_source", "agent_name")},
    }
    numbers = {name: getattr(failed, name) for name in ("group_id", "member", "version")}
    valid = {
        name: None if text is None else text.encode("utf-8", errors="replace").decode()
        for name, text in texts.items()
    }
    return {"step": step, "time": int(failed.time * 1000), **valid, **numbers}


def _attempt(row: Mapping[str, Any]) -> FailedAttempt:
    plugin = None if row["kind"] is None else PluginId(row["kind"], row["plugin"])
    failure = Failure(row["text"], plugin, row["error"], row["place"], row["traceback"])
    own = {
        name: row[name]
        for name in ("became", "task_id", "data_source", "agent_name", "group_id", "member", "version")
    }
    return FailedAttempt(failure, Outcome(row["outcome"]), time=row["time"].timestamp(), **own)
