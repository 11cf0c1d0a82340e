"""Stored responses: rows of a Parquet file with a list of responses each, prepared for scoring.

    data_source   str                         selects the reward
    responses     [str, ...]                  the texts to score
    reward_model  {ground_truth, ...}         optional: the reward decides whether it needs a ground truth
    prompt        [{role, content}, ...]      or one text; optional
    extra_info    {...}                       optional

All names are configurable. Every error names the file, the row (counted from 0) and the field.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.config.data import DataConfig
from agentrl.data.files import read_batch
from agentrl.data.row_place import RowPlace
from agentrl.data.row_values import read_object
from agentrl.data.rows import messages_or_text, read_messages
from agentrl.errors import DataError
from agentrl.plugins import Attempted, Unreachable
from agentrl.plugins.sources import absence
from agentrl.types import Message, Outcome, Task

THOUGHT = re.compile(r"<think>\n(.+)\n</think>\n(.*)", re.DOTALL)
NO_ENVIRONMENT = "a stored response has no environment"
STREAM_ROWS = 256
"""Rows converted to Python objects at once."""


@dataclass(frozen=True, slots=True)
class StoredRow:
    """One row: its task, and its responses in order; None for a null response."""

    task: Task
    responses: tuple[str | None, ...]

    def attempted(self, response: str) -> Attempted:
        """Return a response in the form in which rewards receive an attempt.

        It is one finished turn, with unknown token counts (0). A response of the form `<think>`, thought,
        `</think>`, text is split into thought and text. `solution_str` is the whole response.
        """
        thought = THOUGHT.fullmatch(response)
        said = (
            Message("assistant", response)
            if thought is None
            else Message("assistant", thought[2], reasoning=thought[1])
        )
        messages = (*self.task.messages, said)
        return Attempted(
            self.task,
            messages,
            Outcome.COMPLETED,
            num_turns=1,
            num_response_tokens=0,
            num_action_tokens=0,
            max_response_tokens=0,
            environment=None if self.task.environment_kwargs is None else Unreachable(NO_ENVIRONMENT),
            decoded=response,
        )


class ResponseFile:
    """A Parquet file of stored responses."""

    def __init__(self, path: Path, columns: DataConfig, response_key: str) -> None:
        """Open the file and check its columns.

        Raises:
            DataError: the file cannot be read, or a required column is missing.
        """
        if not path.is_file():
            raise DataError(f"file {str(path)!r} {absence(path, ('.parquet',))}")
        try:
            self.parquet = pq.ParquetFile(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"file {str(path)!r} cannot be read as Parquet: {error}") from error
        self.path = path
        self.schema: pa.Schema = self.parquet.schema_arrow
        self._keys = columns
        self._response_key = response_key
        self._require(columns.data_source_key, _is_text, "texts")
        self._require(response_key, _is_list_of_texts, "lists of texts")

    def stored_rows(self) -> Iterator[StoredRow]:
        """Yield all rows in order.

        Raises:
            DataError: a row is malformed.
        """
        start = 0
        for batch in self.parquet.iter_batches(batch_size=STREAM_ROWS, columns=self._read_columns):
            yield from self.read(batch, start)
            start += batch.num_rows

    def read(self, rows: pa.RecordBatch | pa.Table, start: int) -> Iterator[StoredRow]:
        """Yield the given rows of the file, which begin at its row `start`.

        Raises:
            DataError: a row is malformed.
        """
        known = rows.select([name for name in self._read_columns if name in rows.schema.names])
        for offset in range(0, rows.num_rows, STREAM_ROWS):
            first, path = start + offset, str(self.path)
            for index, row in enumerate(read_batch(known.slice(offset, STREAM_ROWS), path, first)):
                yield self._stored_row(row, RowPlace(path, self.path.stem, first + index))

    @property
    def _read_columns(self) -> list[str]:
        keys = self._keys
        named = (
            keys.data_source_key,
            keys.prompt_key,
            keys.ability_key,
            keys.reward_model_key,
            keys.extra_info_key,
            self._response_key,
        )
        return [name for name in named if name in self.schema.names]

    def _require(self, name: str, fits: Callable[[pa.DataType], bool], wanted: str) -> None:
        if name not in self.schema.names:
            near = difflib.get_close_matches(name, self.schema.names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(self.schema.names)}"
            raise DataError(f"{self.path}: there is no column {name!r}; {hint}")
        kind = self.schema.field(name).type
        if not fits(kind.value_type if pa.types.is_dictionary(kind) else kind):
            raise DataError(f"{self.path}: column {name!r} must contain {wanted}, is {kind}")

    def _stored_row(self, row: Mapping[str, Any], place: RowPlace) -> StoredRow:
        keys = self._keys
        source = row[keys.data_source_key]
        if not source:
            raise place.error(keys.data_source_key, "must name a data source, is empty")
        reward_model = read_object(row.get(keys.reward_model_key), place, keys.reward_model_key)
        task = Task(
            task_id=place.task_id,
            data_source=source,
            messages=_messages(row.get(keys.prompt_key), place, keys.prompt_key),
            agent_name="",
            ground_truth=reward_model.get("ground_truth"),
            ability=str(row.get(keys.ability_key) or ""),
            extra_info=read_object(row.get(keys.extra_info_key), place, keys.extra_info_key),
        )
        return StoredRow(task, tuple(row[self._response_key] or ()))


def _is_list_of_texts(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return is_list and (_is_text(kind.value_type) or pa.types.is_null(kind.value_type))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _messages(value: Any, place: RowPlace, field: str) -> tuple[Message, ...]:
    value = messages_or_text(value)
    if value is None:
        return ()
    return (Message("user", value),) if isinstance(value, str) else read_messages(value, place, field)
