"""The data sets of an evaluation, benchmarks and files of rows, with a key for each attempt."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.storage_urls import is_url, shown
from agentrl.data.checked_dataset import Playable, build_dataset
from agentrl.data.dataset import Dataset, DatasetReport
from agentrl.errors import ConfigError
from agentrl.evaluation.attempt_keys import AttemptSettings, attempt_key, problem_hash, producer_of
from agentrl.evaluation.templates import Template, applied, template_of
from agentrl.registered import registered
from agentrl.types import JsonObject, Task

FILE_SUFFIXES = (".parquet", ".jsonl", ".json")


@dataclass(frozen=True, slots=True)
class DataSet:
    """A named data set.

    `dataset` has its rows as tasks; `producer` has the settings that affect its attempts (see `producer_of`).
    """

    name: str
    dataset: Dataset
    template: Template | None
    producer: JsonObject

    @property
    def report(self) -> DatasetReport:
        return self.dataset.report

    @property
    def template_name(self) -> str:
        return "none" if self.template is None else self.template.full_name


@dataclass(frozen=True, slots=True)
class EvaluationProblem:
    """A task to be played by members 0..n-1.

    `number` is its index among all problems of the evaluation; `keys` has one key per member.
    """

    number: int
    task: Task
    keys: tuple[str, ...]


def resolve_files(on: Sequence[str], *, data_dir: Path | None, scratch: Path) -> dict[str, str]:
    """Return name -> file of rows for each of `on`: a file, or a benchmark, which is written into `scratch`.

    Raises:
        ConfigError: `on` is empty, has duplicates, or names neither a benchmark nor a file.
        DataError: a benchmark's original files are not available.
    """
    benchmarks = registered("agentrl.benchmarks")
    if not on:
        raise ConfigError(
            f"choose what to evaluate on with --on: {', '.join(benchmarks)}, or files of rows (FILE.parquet)"
        )
    files: dict[str, str] = {}
    for text in on:
        path = Path(shown(text) if is_url(text) else text)
        is_file = path.suffix in FILE_SUFFIXES
        name = path.stem if is_file else text
        if not is_file and name not in benchmarks:
            raise ConfigError(
                f"--on {text!r} is not a dataset; use one of {', '.join(benchmarks)}, or a file "
                f"{'|'.join(FILE_SUFFIXES)}"
            )
        if name in files:
            raise ConfigError(
                f"--on contains {name!r} twice; results are stored by name, so rename one of the files"
            )
        files[name] = text if is_file else str(benchmarks[name].load()(scratch, folder=data_dir))
    return files


def open_data_set(
    name: str,
    file: str,
    settings: AttemptSettings,
    playable: Playable,
    *,
    agent: str | None,
    max_rows: int | None,
    images: Path,
) -> DataSet:
    """Read and check all rows of a file, with the data set's prompt template applied.

    Args:
        agent: full name of the agent that plays every row, whatever agent the row names; None: the rows' own.
        images: folder in which the images of rows are stored.

    Raises:
        UserError: a row is malformed, or cannot be played or scored.
    """
    template = template_of(name, settings.sampling.templates)

    def change(task: Task) -> Task:
        task = applied(task, template)
        return task if agent is None else dataclasses.replace(task, agent_name=agent)

    dataset = build_dataset(settings.data, [file], playable, max_rows=max_rows, change=change, images=images)
    return DataSet(name, dataset, template, producer_of(settings, template))


def problems_of(data_sets: Sequence[DataSet], n: int) -> Iterator[EvaluationProblem]:
    """Yield the problems of all data sets, in the order of their rows."""
    number = 0
    for data_set in data_sets:
        seen: Counter[str] = Counter()
        key = attempt_key(data_set.producer)
        for row in range(len(data_set.dataset)):
            task = data_set.dataset.task(row)
            content = problem_hash(task)
            keys = tuple(key(content, seen[content], member) for member in range(n))
            seen[content] += 1
            yield EvaluationProblem(number, task, keys)
            number += 1
