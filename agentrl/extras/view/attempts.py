"""The table of attempts: filters, order, pages and histograms over all files of a source.

A query advances file by file for as long as its caller has time. Numbers and codes that were read once are
kept, so that the next query of a large run takes milliseconds.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import DataError
from agentrl.extras.view.columns import KINDS, NUMBERS, OpenFile
from agentrl.extras.view.sources import AttemptFile, Signature, ViewSource, signature_of

MAX_KEPT_BYTES = 96 * 2**20
"""Columns that are kept; beyond it, those used least recently are read again."""
MAX_QUERIES = 6
NUM_BINS = 24
_TEXTS = ("task", "failure", "text")
_PARTS = re.compile(r'[a-z]+:"[^"]*"|"[^"]*"|\S+')
_ORDER_OF_FILES = "newest"


@dataclass(frozen=True, slots=True)
class Filters:
    """Which attempts: all conditions must hold.

    ranges: lowest and highest value of a number, both included; None: no limit.
    choices: the values to keep. contains: part of a text, whatever the case.
    """

    ranges: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    choices: Mapping[str, frozenset[str]] = field(default_factory=dict)
    contains: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, conditions: Mapping[str, str]) -> Filters:
        """Read conditions by column: `3`, `3..5`, `..5` for numbers, `a,b` for choices, else a text.

        Raises:
            DataError: there is no such column, or a number is expected.
        """
        ranges: dict[str, tuple[float | None, float | None]] = {}
        choices: dict[str, frozenset[str]] = {}
        contains: dict[str, str] = {}
        for name, text in conditions.items():
            if name not in KINDS:
                raise DataError(f"there is no column {name!r}; columns: {', '.join(KINDS)}")
            if KINDS[name] == "number":
                ranges[name] = _range(name, text)
            elif KINDS[name] == "choice":
                choices[name] = frozenset(part.strip() for part in text.split(",") if part.strip())
            elif text:
                contains[name] = text
        return cls(ranges, choices, contains)

    @classmethod
    def parse_line(cls, line: str) -> Filters:
        """Read a line as the page's: `step:40 outcome:truncated failure:"ran out" other words`.

        Raises:
            DataError: as `parse`.
        """
        conditions: dict[str, str] = {}
        words: list[str] = []
        for part in _PARTS.findall(line):
            name, colon, value = part.partition(":")
            if colon and value and name in KINDS:
                conditions[name] = value.strip('"')
            else:
                words.append(part.strip('"'))
        return cls.parse(conditions | ({"text": " ".join(words)} if words else {}))

    @property
    def key(self) -> tuple[Any, ...]:
        """The filters as a hashable value."""
        return (
            tuple(sorted(self.ranges.items())),
            tuple(sorted((name, tuple(sorted(kept))) for name, kept in self.choices.items())),
            tuple(sorted(self.contains.items())),
        )


def _range(name: str, text: str) -> tuple[float | None, float | None]:
    low, dots, high = text.partition("..")
    try:
        least = float(low) if low.strip() else None
        most = (float(high) if high.strip() else None) if dots else least
    except ValueError:
        raise DataError(
            f"{name}={text!r} is no number and no range of numbers, such as 3, 3..5 or ..5"
        ) from None
    return least, most


@dataclass(frozen=True, slots=True)
class TableRow:
    """A line of the table. `key` names the attempt: file and row within it. NaN: not known."""

    key: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Page:
    """Part of a query's rows.

    total: rows found. searched, of: files. is_complete: every file was searched, so `total` is final.
    """

    rows: tuple[TableRow, ...]
    offset: int
    total: int
    searched: int
    of: int

    @property
    def is_complete(self) -> bool:
        return self.searched == self.of


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of a column over a query's rows, of the files searched so far.

    edges: of the bins of a number, one more than counts. labels: values of a choice, most frequent first.
    unknown: rows without a value. num_rows: those counted, at first fewer than the query has.
    """

    column: str
    counts: tuple[int, ...]
    edges: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()
    unknown: int = 0
    num_rows: int = 0


class ColumnStore:
    """Columns of files, read when they are needed and kept while they fit."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[tuple[str, Signature, str], NDArray[Any]] = OrderedDict()
        self._values: dict[str, dict[str, int]] = {}
        self._lock = threading.RLock()

    def code(self, column: str, value: str) -> int:
        """Return the code of a choice's value, the same for all files."""
        codes = self._values.setdefault(column, {})
        return codes.setdefault(value, len(codes))

    def values(self, column: str) -> list[str]:
        """Return the values of a choice by their codes, of the files read so far."""
        return list(self._values.get(column, {}))

    def numbers(self, file: _Opened, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Return numbers of a file by column."""
        found = {name: kept for name in names if (kept := self._get(file, name)) is not None}
        if missing := [name for name in names if name not in found]:
            read = file.open.numbers(missing)
            for name, values in read.items():
                self._keep(file, name, values)
            found |= read
        return found

    def choices(self, file: _Opened, name: str) -> NDArray[np.int32]:
        """Return the codes of a choice; -1: none."""
        if (kept := self._get(file, name)) is not None:
            return kept
        codes, values = file.open.choices(name)
        mapped = np.array([self.code(name, value) for value in values] + [-1], np.int32)[codes]
        self._keep(file, name, mapped)
        return mapped

    def tools(self, file: _Opened) -> NDArray[np.int64]:
        """Return [2, pairs]: a row, and the code of a tool that it called."""
        if (kept := self._get(file, "tool")) is not None:
            return kept
        rows, codes, names = file.open.tools()
        used, places = np.unique(codes, return_inverse=True)
        own = np.array([self.code("tool", names[code]) for code in used.tolist()], np.int64)
        pairs = np.stack([rows, own[places]])
        self._keep(file, "tool", pairs)
        return pairs

    def _get(self, file: _Opened, name: str) -> NDArray[Any] | None:
        with self._lock:
            key = (file.file.name, file.signature, name)
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _keep(self, file: _Opened, name: str, values: NDArray[Any]) -> None:
        with self._lock:
            self._kept[file.file.name, file.signature, name] = values
            self._num_bytes += values.nbytes
            while self._num_bytes > self._max_bytes and len(self._kept) > 1:
                _, old = self._kept.popitem(last=False)
                self._num_bytes -= old.nbytes


class _Opened:
    """A file that is opened only if something of it must be read."""

    def __init__(self, file: AttemptFile, signature: Signature) -> None:
        self.file, self.signature = file, signature
        self._open: OpenFile | None = None

    @property
    def open(self) -> OpenFile:
        if self._open is None:
            self._open = OpenFile(self.file)
        return self._open

    def close(self) -> None:
        if self._open is not None:
            self._open.__exit__()


class AttemptTable:
    """All attempts of a source. Thread-safe; queries are answered one at a time."""

    def __init__(self, source: ViewSource, *, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._files_of = source.files
        self._store = ColumnStore(max_kept_bytes)
        self._sizes: dict[tuple[str, Signature], int] = {}
        self._queries: OrderedDict[tuple[Any, ...], _Query] = OrderedDict()
        self._lock = threading.Lock()

    def page(
        self,
        filters: Filters,
        *,
        sort: str = _ORDER_OF_FILES,
        offset: int = 0,
        limit: int = 100,
        budget_s: float = 0.6,
    ) -> Page:
        """Return rows of a query, after at most about `budget_s` of searching.

        sort: `newest`, a number's name, or `-` and its name for the largest first.

        Raises:
            DataError: the filters or the order name no column, or a file is damaged.
        """
        with self._lock:
            query = self._query(filters, sort)
            query.advance(budget_s)
            places = query.places(offset, limit)
            return Page(
                tuple(self._rows(query, places)), offset, query.total, query.num_searched, len(query.files)
            )

    def histogram(self, filters: Filters, column: str, *, budget_s: float = 0.6) -> Histogram:
        """Return how a column is distributed over a query's rows.

        Raises:
            DataError: it is no column with a distribution, or a file is damaged.
        """
        if KINDS.get(column) not in ("number", "choice"):
            raise DataError(f"{column!r} has no histogram; only numbers and choices have")
        with self._lock:
            query = self._query(filters, _ORDER_OF_FILES)
            deadline = time.monotonic() + budget_s
            query.advance(budget_s)
            found = [np.empty(0, np.float32)]
            num_rows = 0
            for file, rows in query.parts():
                if time.monotonic() > deadline and len(found) > 1:
                    break
                with _opened(file) as opened:
                    found.append(self._of_rows(opened, column, rows))
                num_rows += len(rows)
            values = np.concatenate(found)
            counted = (
                _bins(column, values)
                if KINDS[column] == "number"
                else _counts(column, values.astype(np.int64), self._store.values(column))
            )
            return replace(counted, num_rows=num_rows)

    def key_at(self, filters: Filters, *, sort: str, offset: int) -> str | None:
        """Return the key of the row at `offset` of a query; None if there is none."""
        page = self.page(filters, sort=sort, offset=offset, limit=1)
        return page.rows[0].key if page.rows else None

    # ---------------------------------------------------------------------------------------------- the query

    def _query(self, filters: Filters, sort: str) -> _Query:
        name = sort.removeprefix("-")
        if name != _ORDER_OF_FILES and KINDS.get(name) != "number":
            raise DataError(f"sort={sort!r}: sort by {_ORDER_OF_FILES}, {', '.join(NUMBERS)}")
        files = [(file, found) for file in self._files_of() if (found := signature_of(file)) is not None]
        key = (filters.key, sort, tuple((file.name, found) for file, found in files))
        if key not in self._queries:
            self._queries[key] = _Query(files, filters, sort, self._matching, self._column)
            while len(self._queries) > MAX_QUERIES:
                self._queries.popitem(last=False)
        self._queries.move_to_end(key)
        return self._queries[key]

    def _column(self, file: _Opened, name: str) -> NDArray[Any]:
        if KINDS[name] == "number":
            return self._store.numbers(file, [name])[name]
        return self._store.choices(file, name)

    def _matching(self, file: _Opened, filters: Filters) -> NDArray[np.int32]:
        """Return the rows of a file that pass. What needs most reading is asked last, of what is left."""
        if _is_outside(file, filters):
            return np.empty(0, np.int32)
        key = (file.file.name, file.signature)
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = file.open.num_rows
        keep = np.ones(size, bool)
        for name, kept in filters.choices.items():
            if not keep.any():
                break
            keep &= self._has_tool(file, kept, size) if name == "tool" else self._is_one_of(file, name, kept)
        numbers = self._store.numbers(file, list(filters.ranges)) if filters.ranges and keep.any() else {}
        for name, values in numbers.items():
            low, high = filters.ranges[name]
            keep &= ~np.isnan(values)
            if low is not None:
                keep &= values >= np.float32(low) if name != "group" else values >= low
            if high is not None:
                keep &= values <= np.float32(high) if name != "group" else values <= high
        for name in _TEXTS:
            if name in filters.contains and keep.any():
                keep &= file.open.contains(name, filters.contains[name])
        return np.flatnonzero(keep).astype(np.int32)

    def _is_one_of(self, file: _Opened, name: str, kept: frozenset[str]) -> NDArray[np.bool_]:
        codes = self._store.choices(file, name)
        return np.isin(codes, [self._store.code(name, value) for value in kept])

    def _has_tool(self, file: _Opened, kept: frozenset[str], size: int) -> NDArray[np.bool_]:
        rows, codes = self._store.tools(file)
        found = np.zeros(size, bool)
        found[rows[np.isin(codes, [self._store.code("tool", name) for name in kept])]] = True
        return found

    def _of_rows(self, file: _Opened, name: str, rows: NDArray[np.int32]) -> NDArray[Any]:
        """Return a column's values in some rows; of tools, one for each that a row called."""
        if name != "tool":
            return self._column(file, name)[rows]
        callers, codes = self._store.tools(file)
        return codes[np.isin(callers, rows)]

    # ----------------------------------------------------------------------------------------------- its rows

    def _rows(self, query: _Query, places: Sequence[tuple[int, int]]) -> Iterator[TableRow]:
        """Yield the rows at (file, row), with all columns of the table."""
        wanted: dict[int, list[int]] = {}
        for number, row in places:
            wanted.setdefault(number, []).append(row)
        found: dict[tuple[int, int], TableRow] = {}
        for number, rows in wanted.items():
            file, signature = query.files[number]
            with _opened((file, signature)) as opened:
                try:
                    lines = opened.open.lines(np.asarray(rows, np.int64))
                except FileNotFoundError:  # moved away meanwhile
                    continue
                for row, values in zip(rows, lines, strict=True):
                    found[number, row] = TableRow(f"{file.name}:{row}", values)
        yield from (found[place] for place in places if place in found)


class _Query:
    """The rows that pass, by file, as far as the files were searched."""

    def __init__(
        self,
        files: Sequence[tuple[AttemptFile, Signature]],
        filters: Filters,
        sort: str,
        matching: Callable[[_Opened, Filters], NDArray[np.int32]],
        column: Callable[[_Opened, str], NDArray[Any]],
    ) -> None:
        self.files = files
        self.num_searched = 0
        self.total = 0
        self._filters, self._matching, self._column = filters, matching, column
        self._is_descending, self._sort = sort.startswith("-"), sort.removeprefix("-")
        self._found: list[NDArray[np.int32]] = []
        self._keys: list[NDArray[Any]] = []
        self._order: tuple[int, NDArray[np.int64]] | None = None

    def advance(self, budget_s: float) -> None:
        """Search on, at least one file, until the time is over."""
        deadline = time.monotonic() + budget_s
        while self.num_searched < len(self.files):
            with _opened(self.files[self.num_searched]) as file:
                try:
                    rows = self._matching(file, self._filters)
                    if self._sort != _ORDER_OF_FILES:
                        self._keys.append(self._column(file, self._sort)[rows])
                except FileNotFoundError:  # moved away meanwhile
                    rows = np.empty(0, np.int32)
                    if self._sort != _ORDER_OF_FILES:
                        self._keys.append(np.empty(0, np.float32))
            self._found.append(rows)
            self.total += len(rows)
            self.num_searched += 1
            if time.monotonic() > deadline:
                return

    def parts(self) -> Iterator[tuple[tuple[AttemptFile, Signature], NDArray[np.int32]]]:
        """Yield each searched file with its rows that pass, if any."""
        for file, rows in zip(self.files, self._found, strict=False):
            if len(rows):
                yield file, rows

    def places(self, offset: int, limit: int) -> list[tuple[int, int]]:
        """Return (file, row) of some rows in the query's order."""
        starts = np.concatenate([[0], np.cumsum([len(rows) for rows in self._found])]).astype(np.int64)
        chosen = (
            self._sorted()[offset : offset + limit]
            if self._sort != _ORDER_OF_FILES
            else np.arange(offset, min(offset + limit, self.total))
        )
        files = np.searchsorted(starts, chosen, side="right") - 1
        return [
            (int(file), int(self._found[file][place - starts[file]]))
            for file, place in zip(files, chosen, strict=True)
        ]

    def _sorted(self) -> NDArray[np.int64]:
        """Return the order of all rows found: equal ones in the order of the files, unknown ones last."""
        if self._order is None or self._order[0] != self.num_searched:
            keys = np.concatenate([np.empty(0, np.float32), *self._keys])
            order = np.argsort(-keys if self._is_descending else keys, kind="stable")
            self._order = (self.num_searched, order)
        return self._order[1]


class _opened:
    """Context of a file that is closed again if it was opened."""

    def __init__(self, file: tuple[AttemptFile, Signature]) -> None:
        self._file = _Opened(*file)

    def __enter__(self) -> _Opened:
        return self._file

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _is_outside(file: _Opened, filters: Filters) -> bool:
    """Return whether a file's name or its statistics exclude every row."""
    own = file.file
    for name, value in (("set", own.set), ("policy", own.policy)):
        if name in filters.choices and (value or "") not in filters.choices[name]:
            return True
    for name, (low, high) in filters.ranges.items():
        bounds = (float(own.step),) * 2 if name == "step" and own.step is not None else None
        if bounds is None and name in ("step", "group", "member"):
            bounds = file.open.bounds(name)
        if bounds is not None and (
            (low is not None and bounds[1] < low) or (high is not None and bounds[0] > high)
        ):
            return True
    return False


def _bins(column: str, values: NDArray[Any]) -> Histogram:
    known = values[np.isfinite(values)]
    unknown = len(values) - len(known)
    if not len(known):
        return Histogram(column, (), unknown=unknown)
    low, high = float(known.min()), float(known.max())
    distinct = np.unique(known[:10_000])
    is_whole = bool((known == np.rint(known)).all())
    if is_whole and high - low < NUM_BINS:
        edges = np.arange(low - 0.5, high + 1.0)  # a bin for each whole number
    elif low == high or len(distinct) == 1:
        edges = np.array([low - 0.5, low + 0.5]) if low == high else np.linspace(low, high, NUM_BINS + 1)
    else:
        edges = np.linspace(low, high, NUM_BINS + 1)
    counts, edges = np.histogram(known, bins=edges)
    return Histogram(column, tuple(counts.tolist()), edges=tuple(edges.tolist()), unknown=unknown)


def _counts(column: str, codes: NDArray[np.int64], labels: Sequence[str]) -> Histogram:
    counts = np.bincount(codes[codes >= 0], minlength=len(labels)).tolist()
    ordered = sorted(
        ((label, n) for label, n in zip(labels, counts, strict=True) if n), key=lambda i: (-i[1], i[0])
    )
    return Histogram(
        column,
        tuple(n for _, n in ordered),
        labels=tuple(label for label, _ in ordered),
        unknown=int((codes < 0).sum()),
    )
