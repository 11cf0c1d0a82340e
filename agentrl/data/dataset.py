"""The tasks of a run, with random access by position.

The cursor of an endless shuffled stream is therefore one integer.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agentrl.config.data import DataConfig
from agentrl.data.files import RowFile, file_ids, open_rows
from agentrl.data.image_files import ImageBounds, ImageFolder
from agentrl.data.reader import TaskReader, task_reader
from agentrl.data.row_place import RowPlace
from agentrl.data.rows import AgentChoice
from agentrl.errors import ConfigError, DataError, PluginError
from agentrl.types import Task


@dataclass(frozen=True, slots=True)
class DatasetReport:
    """Counts of the rows read: `rows` = tasks kept + `filtered`.

    `truncated` of the kept ones will be cut by the session; `repeated` equal an earlier row in every field.
    """

    rows: int
    filtered: int
    truncated: int
    repeated: int = 0


class Dataset:
    """Tasks of Parquet and JSON-lines files.

    Position p is row p % len(self) of epoch p // len(self). With `shuffle`, each epoch has its own
    permutation, determined by (seed, epoch). Thread-safe.
    """

    def __init__(
        self,
        files: Sequence[str],
        config: DataConfig,
        *,
        agents: AgentChoice,
        seed: int,
        shuffle: bool,
        measure: Callable[[Task], int] | None = None,
        check: Callable[[Task], None] | None = None,
        max_rows: int | None = None,
        change: Callable[[Task], Task] | None = None,
        images: Path | None = None,
    ) -> None:
        """Open `files`, read each row once, and keep the rows whose prompt fits.

        Args:
            change: applied to each task before anything else; None: tasks stay unchanged.
            measure: length of a task's prompt in tokens; None: no prompt is too long. Without `measure` and
                `check`, rows are not read before use.
            check: raises if a task cannot be played (unknown reward, tool, ...).
            max_rows: use only this many rows, from the beginning.
            images: folder in which `task` stores the images of its row; None: they are only checked, and the
                tasks cannot be played.

        Raises:
            DataError: no file, a missing file, a malformed row, an overlong prompt under the policy `error`,
                or no row is left.
            PluginError: a row names an unknown agent.
        """
        if not files:
            raise DataError("no dataset files; set data.train_files (or data.val_files)")
        self._config = config
        self._files: list[RowFile] = [open_rows(path) for path in files]
        self._ids = file_ids(files)
        self._starts = np.concatenate([[0], np.cumsum([len(file) for file in self._files], dtype=np.int64)])
        bounds = ImageBounds(config.images.max_bytes, config.images.max_pixels)
        self._read = _changed(task_reader(config, agents, ImageFolder(bounds)), change)
        self._read_to_play = _changed(task_reader(config, agents, ImageFolder(bounds, images)), change)
        self._seed, self._shuffle = seed, shuffle
        self._orders: dict[int, NDArray[np.int64]] = {}
        self._lock = threading.Lock()

        num_rows = int(self._starts[-1]) if max_rows is None else min(max_rows, int(self._starts[-1]))
        if measure is None and check is None:
            self._kept = np.arange(num_rows, dtype=np.int64)
            self._sources: list[str] | None = None
            self.report = DatasetReport(rows=num_rows, filtered=0, truncated=0)
        else:
            self._kept, self._sources, self.report = _select(
                self._tasks(num_rows), config, measure=measure, check=check
            )
        if not len(self._kept):
            cause = (
                f"all {num_rows} prompts exceed data.max_prompt_tokens={config.max_prompt_tokens}; raise it"
                if num_rows
                else "the files have no rows"
            )
            raise DataError(f"no task in {', '.join(files)}: {cause}")

    def __len__(self) -> int:
        return len(self._kept)

    def task(self, position: int) -> Task:
        """Return the task at `position` = epoch * len(self) + index.

        Raises:
            DataError, PluginError: as in the constructor, for rows that were not read there.
        """
        epoch, index = divmod(position, len(self))
        number = int(self._kept[self._order(epoch)[index]]) if self._shuffle else int(self._kept[index])
        which = int(np.searchsorted(self._starts, number, side="right")) - 1
        row = number - int(self._starts[which])
        return self._read_to_play(self._files[which].row(row), self._place(which, row))

    def check_first(
        self, rows_per_file: int, *, measure: Callable[[Task], int], check: Callable[[Task], None]
    ) -> None:
        """Read the first rows of each file, and check and measure them as the constructor does.

        Raises:
            DataError, PluginError: as in the constructor, but not if no row is left.
        """
        _select(self._tasks(len(self), rows_per_file), self._config, measure=measure, check=check)

    def sources(self) -> list[str]:
        """Return the data source of each kept row, in the order of the files.

        Raises:
            DataError, PluginError: as in the constructor, for rows that were not read there.
        """
        if self._sources is None:
            self._sources = [sys.intern(str(task.data_source)) for _, task in self._tasks(len(self))]
        return self._sources

    def _order(self, epoch: int) -> NDArray[np.int64]:
        with self._lock:
            if epoch not in self._orders:
                # Keep two epochs: around their border, groups that are queued again still belong to the
                # earlier epoch.
                for old in sorted(self._orders)[:-1]:
                    del self._orders[old]
                self._orders[epoch] = np.random.default_rng([self._seed, epoch]).permutation(len(self))
            return self._orders[epoch]

    def _tasks(self, limit: int, rows_per_file: int | None = None) -> Iterator[tuple[RowPlace, Task]]:
        """Yield the first `limit` tasks, at most `rows_per_file` of each file."""
        for which, file in enumerate(self._files):
            remaining = limit - int(self._starts[which])
            if remaining <= 0:
                return
            for row, raw in enumerate(
                file.rows(remaining if rows_per_file is None else min(remaining, rows_per_file))
            ):
                place = self._place(which, row)
                yield place, self._read(raw, place)

    def _place(self, which: int, row: int) -> RowPlace:
        file = self._files[which]
        return RowPlace(file.path, self._ids[which], row, file.line(row))


def _changed(read: TaskReader, change: Callable[[Task], Task] | None) -> TaskReader:
    return read if change is None else lambda row, place: change(read(row, place))


def _select(
    tasks: Iterator[tuple[RowPlace, Task]],
    config: DataConfig,
    *,
    measure: Callable[[Task], int] | None,
    check: Callable[[Task], None] | None,
) -> tuple[NDArray[np.int64], list[str], DatasetReport]:
    kept: list[int] = []
    sources: list[str] = []
    hashes = array("q")
    rows = truncated = 0
    for number, (place, task) in enumerate(tasks):
        rows += 1
        tokens = _size(task, place, measure=measure, check=check)
        if tokens > config.max_prompt_tokens:
            if config.overlong_prompts == "error":
                cure = "raise it, or set data.overlong_prompts=filter"
                raise place.error(
                    config.prompt_key,
                    f"{tokens} tokens exceed data.max_prompt_tokens={config.max_prompt_tokens}; {cure}",
                )
            if config.overlong_prompts == "filter":
                continue
            truncated += 1
        kept.append(number)
        # Interned: one string per source, however many rows have it
        sources.append(sys.intern(str(task.data_source)))
        hashes.append(hash(repr(dataclasses.replace(task, task_id=""))))
    repeated = len(kept) - len(set(hashes))
    report = DatasetReport(rows=rows, filtered=rows - len(kept), truncated=truncated, repeated=repeated)
    return np.array(kept, dtype=np.int64), sources, report


def _size(
    task: Task,
    place: RowPlace,
    *,
    measure: Callable[[Task], int] | None,
    check: Callable[[Task], None] | None,
) -> int:
    try:
        if check is not None:
            check(task)
        return 0 if measure is None else measure(task)
    except (ConfigError, DataError, PluginError) as error:
        raise type(error)(f"{place}: {error}") from error


def check_source_weights(weights: Mapping[str, float], sources: Iterable[str]) -> None:
    """Check that the weights name exactly the sources of the tasks.

    Raises:
        DataError: a weight has no source, or a source has no weight; the message lists them.
    """
    present = sorted(set(sources))
    unknown = [name for name in weights if name not in present]
    if unknown:
        raise DataError(
            f"data.curriculum.source_weights names {', '.join(unknown)}, but no training row that "
            f"is kept has this source; the data has {', '.join(present)}"
        )
    unweighed = [name for name in present if name not in weights]
    if unweighed:
        raise DataError(
            f"data.curriculum.source_weights has no weight for {', '.join(unweighed)}; give every "
            "source of data.train_files a weight, or remove its files"
        )
