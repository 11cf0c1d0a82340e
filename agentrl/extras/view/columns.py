"""Columns of attempts, read from Parquet files one by one: of each file only the leaves that a column needs.

A number that is not known of an attempt (the reward of one that failed) is NaN, and no filter keeps it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from agentrl.data.parquet_files import open_parquet, reading_parquet
from agentrl.data.trajectories import WHAT, check_schema
from agentrl.errors import DataError
from agentrl.extras.view.sources import AttemptFile
from agentrl.types import SCORED_OUTCOMES

Numbers = NDArray[np.floating[Any]]
Kind = Literal["number", "choice", "text"]

STORED_ELSEWHERE = ("masked", "not_scored", "went_on")
"""Consequences of failures (`became`) after which the attempt itself is in another file."""


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of the table: its name, kind, and what it means, for the page."""

    name: str
    kind: Kind
    meaning: str


COLUMNS = (
    TableColumn("step", "number", "step that trained on the attempt, or of the validation"),
    TableColumn("set", "choice", "training, validation, evaluation; failed: retried, replaced or dropped"),
    TableColumn("policy", "choice", "the validated policy: a baseline's name, or the run's own"),
    TableColumn("task", "text", "id of the task"),
    TableColumn("group", "number", "id of the group"),
    TableColumn("member", "number", "place in the group"),
    TableColumn("source", "choice", "data source of the task"),
    TableColumn("agent", "choice", "agent that played"),
    TableColumn("outcome", "choice", "why the attempt stopped"),
    TableColumn("reward", "number", "sum of its rewards; none if it failed"),
    TableColumn("margin", "number", "reward minus the mean of its group's scored attempts"),
    TableColumn("accuracy", "number", "as its reward reports it, else whether the reward is above 0"),
    TableColumn("turns", "number", "turns of the assistant"),
    TableColumn("calls", "number", "tool calls"),
    TableColumn("errors", "number", "tool calls that were answered with an error"),
    TableColumn("tool", "choice", "a tool that it called"),
    TableColumn("sampled", "number", "tokens that the policy sampled"),
    TableColumn("length", "number", "all tokens, prompt included"),
    TableColumn("lag", "number", "version that was trained minus the oldest version of its tokens"),
    TableColumn("seconds", "number", "seconds of generation, tools and partner together"),
    TableColumn("became", "choice", "what became of a failed attempt"),
    TableColumn("failure", "text", "why it failed"),
    TableColumn("text", "text", "anything that was said: messages, thoughts, arguments of calls"),
)
KINDS: Mapping[str, Kind] = {column.name: column.kind for column in COLUMNS}
NUMBERS = tuple(column.name for column in COLUMNS if column.kind == "number")

_METRIC = {"turns": "num_turns", "calls": "num_tool_calls", "errors": "num_tool_errors"}
_SECONDS = ("generate_s", "tool_s", "interaction_s")
_CALLS_OF = "num_calls/"
_PLAIN = {"group": "group_id", "member": "member"}
_CHOICES = {"source": "data_source", "agent": "agent_name", "outcome": "outcome", "became": "became"}
_DICTIONARIES = ("metrics.key_value.key", "data_source", "agent_name", "outcome")
"""Columns with few distinct texts: read as codes."""
_SCORED = pa.array([outcome.value for outcome in SCORED_OUTCOMES])


class OpenFile:
    """One file of attempts while columns of it are read; rows are those of attempts that it alone stores.

    Raises DataError on opening if the file is no such file; it may also have gone meanwhile (OSError).
    """

    def __init__(self, file: AttemptFile) -> None:
        self.file = file
        dictionaries = [] if file.set == "failed" else list(_DICTIONARIES)
        self._parquet = open_parquet(file.path, WHAT, read_dictionary=dictionaries, pre_buffer=False)
        names = self._parquet.schema_arrow.names
        self._names = frozenset(names)
        self._kept: NDArray[np.int64] | None = None
        self._chosen: pa.Table | None = None
        if file.set == "failed":
            became = self._read("became")["became"].combine_chunks()
            own = pc.invert(pc.is_in(became.cast(pa.string()), value_set=pa.array(STORED_ELSEWHERE)))
            self._kept = np.flatnonzero(own.to_numpy(zero_copy_only=False))
        else:
            check_schema(self._parquet.schema_arrow, str(file.path))

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._parquet.close()

    @property
    def num_rows(self) -> int:
        return self._size if self._kept is None else len(self._kept)

    @property
    def _size(self) -> int:
        """Rows of the file, or of the chosen ones."""
        return self._parquet.metadata.num_rows if self._chosen is None else self._chosen.num_rows

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns, not compressed."""
        metadata = self._parquet.metadata
        return sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))

    @property
    def _has_tokens(self) -> bool:
        return self.file.set != "failed"

    def bounds(self, name: str) -> tuple[float, float] | None:
        """Return the least and the largest value of a number that the file's statistics know."""
        stored = _PLAIN.get(name, name)
        if self._kept is not None or stored not in ("step", *_PLAIN.values()) or stored not in self._names:
            return None
        metadata = self._parquet.metadata
        index = next(i for i in range(metadata.num_columns) if metadata.schema.column(i).path == stored)
        found = [
            metadata.row_group(group).column(index).statistics for group in range(metadata.num_row_groups)
        ]
        if not found or any(one is None or not one.has_min_max for one in found):
            return None
        return float(min(one.min for one in found)), float(max(one.max for one in found))

    # ----------------------------------------------------------------------------------------------- numbers

    def numbers(self, names: Sequence[str]) -> dict[str, Numbers]:
        """Return the values of each of these columns: f32[rows]; f64 of ids, which must stay exact."""
        found: dict[str, Numbers] = {}
        needs_metrics = [name for name in names if name in _METRIC or name in ("seconds", "accuracy")]
        if needs_metrics:
            found |= self._of_metrics(needs_metrics)
        for name in names:
            if name not in found:
                found[name] = self._number(name)
        return {
            name: self._rows(found[name]).astype(np.float64 if name == "group" else np.float32)
            for name in names
        }

    def _number(self, name: str) -> NDArray[Any]:
        size = self._size
        unknown = np.full(size, np.nan, np.float32)
        if name == "step":
            if "step" in self._names:
                return self._plain("step")
            return unknown if self.file.step is None else np.full(size, self.file.step, np.float32)
        if name in _PLAIN:
            return self._plain(_PLAIN[name])
        if not self._has_tokens:
            return unknown
        by_name: Mapping[str, Callable[[], NDArray[Any]]] = {
            "reward": self._rewards,
            "margin": self._margins,
            "sampled": self._sampled,
            "length": lambda: self._lists("turn_ids")[1],
            "lag": self._lags,
        }
        return by_name[name]()

    def _plain(self, stored: str) -> NDArray[Any]:
        column = self._read(stored)[stored].combine_chunks()
        return np.asarray(pc.fill_null(column, -1).to_numpy(zero_copy_only=False))

    def _lists(self, leaf: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the flat values of a list column, and the length of each row's list."""
        column = self._read(f"{leaf}.list.element")[leaf].combine_chunks()
        lengths = np.asarray(column.value_lengths().to_numpy(zero_copy_only=False), np.int64)
        return column.flatten().to_numpy(zero_copy_only=False), lengths

    def _rewards(self) -> NDArray[np.float64]:
        column = self._read("rewards.list.element.value", "outcome")
        rewards = column["rewards"].combine_chunks()
        lengths = np.asarray(rewards.value_lengths().to_numpy(zero_copy_only=False), np.int64)
        values = rewards.flatten().field("value").to_numpy(zero_copy_only=False)
        return np.where(self._is_scored(column["outcome"]), _sums(values, lengths), np.nan)

    def _is_scored(self, outcome: pa.ChunkedArray) -> NDArray[np.bool_]:
        plain = outcome.combine_chunks().cast(pa.string())
        return np.asarray(pc.is_in(plain, value_set=_SCORED).to_numpy(zero_copy_only=False))

    def _margins(self) -> NDArray[np.float64]:
        rewards, groups = self._rewards(), self._plain("group_id")
        greedy = self._read("is_greedy")["is_greedy"].combine_chunks().to_numpy(zero_copy_only=False)
        _, group_of = np.unique(groups, return_inverse=True)
        counts = ~np.isnan(rewards) & ~greedy
        num = np.bincount(group_of, weights=counts)
        total = np.bincount(group_of, weights=np.where(counts, rewards, 0.0))
        with np.errstate(invalid="ignore"):
            return rewards - (total / np.where(num > 0, num, np.nan))[group_of]

    def _sampled(self) -> NDArray[np.int64]:
        values, lengths = self._lists("action_mask")
        return _sums(values, lengths).astype(np.int64)

    def _lags(self) -> NDArray[np.float64]:
        if "learned_by" not in self._names:
            return np.full(self._size, np.nan)
        learned_by = self._plain("learned_by")
        versions, lengths = self._lists("versions")
        # Context tokens have no version, which is below every version.
        oldest = np.full(len(lengths), np.inf)
        rows = np.repeat(np.arange(len(lengths)), lengths)[versions >= 0]
        np.minimum.at(oldest, rows, versions[versions >= 0])
        return np.where(np.isinf(oldest), np.nan, learned_by - oldest)

    def _of_metrics(self, names: Sequence[str]) -> dict[str, NDArray[np.float64]]:
        size = self._size
        if not self._has_tokens:
            return {name: np.full(size, np.nan) for name in names}
        table = self._read("metrics", "outcome", "is_greedy")
        keys, values, rows = _entries(table["metrics"])
        dictionary = {key: code for code, key in enumerate(keys.dictionary.to_pylist())}
        codes = keys.indices.to_numpy(zero_copy_only=False)

        def metric(key: str, missing: float) -> NDArray[np.float64]:
            found = np.full(size, missing)
            chosen = codes == dictionary.get(key, -1)
            found[rows[chosen]] = values[chosen]
            return found

        found = {name: metric(_METRIC[name], np.nan) for name in names if name in _METRIC}
        if "seconds" in names:
            found["seconds"] = np.sum([metric(key, 0.0) for key in _SECONDS], axis=0)
        if "accuracy" in names:
            rewards = self._rewards()
            own = metric("accuracy", np.nan)
            accuracy = np.where(np.isnan(own), (rewards > 0).astype(float), own)
            greedy = table["is_greedy"].combine_chunks().to_numpy(zero_copy_only=False)
            counts = self._is_scored(table["outcome"]) & ~greedy & (accuracy >= 0) & (accuracy <= 1)
            found["accuracy"] = np.where(counts, accuracy, np.nan)
        return found

    # ------------------------------------------------------------------------------------- choices and texts

    def choices(self, name: str) -> tuple[NDArray[np.int32], list[str]]:
        """Return the code of each row's value, and the values; -1: none."""
        if name in ("set", "policy"):
            value = self.file.set if name == "set" else self.file.policy
            code = -1 if value is None else 0
            return np.full(self.num_rows, code, np.int32), [] if value is None else [value]
        stored = _CHOICES[name]
        if stored not in self._names:
            return np.full(self.num_rows, -1, np.int32), []
        column = self._read(stored)[stored].combine_chunks()
        if not pa.types.is_dictionary(column.type):
            column = column.dictionary_encode()
        codes = pc.fill_null(column.indices, -1).to_numpy(zero_copy_only=False).astype(np.int32)
        return self._rows(codes), [str(value) for value in column.dictionary.to_pylist()]

    def tools(self) -> tuple[NDArray[np.int64], NDArray[np.int32], list[str]]:
        """Return the pairs of a row and a tool that it called, and the tools' names."""
        none = np.empty(0, np.int64), np.empty(0, np.int32), list[str]()
        if not self._has_tokens:
            return none
        keys, values, rows = _entries(self._read("metrics")["metrics"])
        names = keys.dictionary.to_pylist()
        is_tool = np.array([name.startswith(_CALLS_OF) for name in names], bool)
        codes = keys.indices.to_numpy(zero_copy_only=False)
        called = is_tool[codes] & (values > 0) if len(codes) else np.empty(0, bool)
        if not called.any():
            return none
        return rows[called], codes[called].astype(np.int32), [n.removeprefix(_CALLS_OF) for n in names]

    def contains(self, name: str, needle: str) -> NDArray[np.bool_]:
        """Return bool[rows]: whether a text contains `needle`, whatever the case."""
        size = self._size
        found = np.zeros(size, bool)
        if name == "text" and self._has_tokens:
            for rows, texts in self._said():
                found[rows[_matches(texts, needle)]] = True
        elif name == "task":
            found = _matches(self._read("task_id")["task_id"], needle)
        elif name == "failure":
            found = _matches(self._failures(), needle)
        return self._rows(found)

    def lines(self, rows: NDArray[np.int64]) -> list[dict[str, Any]]:
        """Return the values of all columns of some rows, as the page shows them; None: not known."""
        leaves = _LINE_LEAVES if self._has_tokens else _FAILED_LEAVES
        stored = self.stored_rows(rows)
        own = copy.copy(self)
        own._chosen = pa.Table.from_batches(
            [
                self.rows_at(
                    stored.tolist(), [leaf for leaf in leaves if leaf.partition(".")[0] in self._names]
                )
            ]
        )
        own._kept = None
        numbers = own.numbers([name for name in NUMBERS if name != "margin"])
        # the mean is over the group, which is more than the chosen rows
        numbers["margin"] = self.numbers(["margin"])["margin"][rows]
        values: dict[str, list[Any]] = {name: _plain_numbers(numbers[name]) for name in NUMBERS}
        for name in ("set", "policy", *_CHOICES):
            codes, labels = own.choices(name)
            values[name] = [None if code < 0 else labels[code] for code in codes.tolist()]
        values["task"] = own._read("task_id")["task_id"].to_pylist()
        values["failure"] = own._failures().to_pylist()
        return [dict(zip(values, line, strict=True)) for line in zip(*values.values(), strict=True)]

    def _failures(self) -> pa.Array:
        if not self._has_tokens:
            return self._read("text")["text"].combine_chunks().cast(pa.large_string())
        column = self._read("failure.text")["failure"].combine_chunks()
        if pa.types.is_struct(column.type):
            return pc.struct_field(column, "text")
        return column.cast(pa.large_string())  # format 2: only the text

    def _said(self) -> Iterator[tuple[NDArray[np.int64], pa.Array]]:
        """Yield texts, with the row of each: those of the messages, then those of further conversations."""
        messages = self._read(*_texts_of("messages"))["messages"].combine_chunks()
        yield from _said_in(messages.flatten(), _rows_of(messages))
        if "conversations" not in self._names:  # before format 5
            return
        conversations = self._read(*_texts_of("conversations.list.element.messages"))[
            "conversations"
        ].combine_chunks()
        messages = conversations.flatten().field("messages")
        yield from _said_in(messages.flatten(), _rows_of(conversations)[_rows_of(messages)])

    # --------------------------------------------------------------------------------------------------- rows

    def row(self, row: int) -> pa.RecordBatch:
        """Return one row with all columns. Raises DataError if there is none.

        A file may be one row group of millions: it is read in pieces up to the row.
        """
        if not 0 <= row < self.num_rows:
            raise DataError(f"{self.file.name}: there is no row {row}, the file has {self.num_rows:,}")
        stored = row if self._kept is None else int(self._kept[row])
        return self.rows_at([stored])

    def rows_at(self, stored: Sequence[int], columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Return rows by their place in the file, in the given order."""
        metadata, first, pieces = self._parquet.metadata, 0, []
        order = np.argsort(stored, kind="stable")
        wanted = np.asarray(stored)[order]
        for group in range(metadata.num_row_groups):
            size = metadata.row_group(group).num_rows
            if len(inside := wanted[(wanted >= first) & (wanted < first + size)]):
                pieces += self._taken(group, inside - first, columns)
            first += size
        table = pa.Table.from_batches(pieces).combine_chunks()
        # dictionaries differ between pieces only in files of many; the rows are few
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return table.take(pa.array(back)).combine_chunks().to_batches()[0]

    def _taken(
        self, group: int, rows: NDArray[np.int64], columns: Sequence[str] | None
    ) -> list[pa.RecordBatch]:
        found, first = [], 0
        batches = self._parquet.iter_batches(
            _ROWS_AT_ONCE, row_groups=[group], columns=columns, use_threads=False
        )
        with reading_parquet(self.file.path, WHAT):
            for batch in batches:
                inside = rows[(rows >= first) & (rows < first + batch.num_rows)]
                if len(inside):
                    found.append(batch.take(pa.array(inside - first)))
                first += batch.num_rows
                if first > rows[-1]:
                    break
        return found

    def stored_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places in the file of rows of the table."""
        return rows if self._kept is None else self._kept[rows]

    def _read(self, *leaves: str) -> pa.Table:
        if self._chosen is not None:
            return self._chosen
        with reading_parquet(self.file.path, WHAT):
            return self._parquet.read(columns=list(leaves), use_threads=False)

    def _rows(self, values: NDArray[Any]) -> NDArray[Any]:
        return values if self._kept is None else values[self._kept]


_ROWS_AT_ONCE = 2048
_FAILED_LEAVES = (
    "step", "group_id", "member", "task_id", "data_source", "agent_name", "outcome", "became", "text",
)  # fmt: skip
_LINE_LEAVES = (
    "step", "learned_by", "group_id", "member", "task_id", "data_source", "agent_name", "outcome",
    "is_greedy", "rewards.list.element.value", "metrics.key_value.key", "metrics.key_value.value",
    "failure.text", "action_mask.list.element", "versions.list.element", "turn_ids.list.element",
)  # fmt: skip


def _entries(
    column: pa.ChunkedArray,
) -> tuple[pa.DictionaryArray, NDArray[np.float64], NDArray[np.int64]]:
    """Return the keys of a column of maps, their values, and the row of each."""
    maps = column.combine_chunks()
    maps = maps if isinstance(maps, pa.Array) else pa.concat_arrays(maps.chunks)
    offsets = maps.offsets.to_numpy()
    keys = maps.keys.slice(offsets[0], offsets[-1] - offsets[0])
    values = maps.items.slice(offsets[0], offsets[-1] - offsets[0])
    if not pa.types.is_dictionary(keys.type):
        keys = keys.dictionary_encode()
    rows = np.repeat(np.arange(len(maps)), np.diff(offsets))
    return keys, values.to_numpy(zero_copy_only=False), rows


def _plain_numbers(values: NDArray[Any]) -> list[float | int | None]:
    """Return numbers for JSON: whole ones as integers, rounded to what 32 bits hold; None: not known."""
    found: list[float | int | None] = []
    for value in values.tolist():
        if not np.isfinite(value):
            found.append(None)
        else:
            found.append(int(value) if value == int(value) else float(f"{value:.7g}"))
    return found


def _rows_of(lists: pa.Array) -> NDArray[np.int64]:
    lengths = lists.value_lengths().to_numpy(zero_copy_only=False)
    return np.repeat(np.arange(len(lists)), np.asarray(lengths, np.int64))


def _texts_of(messages: str) -> list[str]:
    """Return the columns of what is said in the messages of a column."""
    leaves = ("content", "reasoning", "tool_calls.list.element.arguments", "tool_calls.list.element.name")
    return [f"{messages}.list.element.{leaf}" for leaf in leaves]


def _said_in(messages: pa.Array, rows: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], pa.Array]]:
    """Yield what the messages say, with the row of each text. rows: i64[messages]."""
    yield rows, messages.field("content")
    yield rows, messages.field("reasoning")
    calls = messages.field("tool_calls")
    of_calls = rows[_rows_of(calls)]
    yield of_calls, calls.flatten().field("arguments")
    yield of_calls, calls.flatten().field("name")


def _sums(values: NDArray[Any], lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the sum of each row's values, f64[rows]."""
    ends = np.cumsum(lengths)
    total = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    return np.asarray(total[ends] - total[ends - lengths])


def _matches(texts: pa.Array | pa.ChunkedArray, needle: str) -> NDArray[np.bool_]:
    if isinstance(texts, pa.ChunkedArray):
        texts = texts.combine_chunks()
    found = pc.match_substring(texts.cast(pa.large_string()), needle, ignore_case=True)
    return np.asarray(pc.fill_null(found, False).to_numpy(zero_copy_only=False))
