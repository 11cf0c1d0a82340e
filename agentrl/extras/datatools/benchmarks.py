"""The named benchmarks of evaluation: where their original files are, and how they are read and prompted.

    gsm8k      the 1,319 questions of its test set      FOLDER/gsm8k/test.jsonl          openai/gsm8k
    aime_2024  AIME I and II of 2024, 30 problems       FOLDER/aime/aime_2024.jsonl      Maxwell-Jia/AIME_2024
    aime_2025  AIME I and II of 2025, 30 problems       FOLDER/aime/aime_2025.jsonl      math-ai/aime25
    math_500   500 problems of MATH's test set          FOLDER/math_500/test.jsonl
    HuggingFaceH4/MATH-500

FOLDER is the given folder, else that of the environment variable AGENTRL_DATA. If there is none, or if the
folder of the variable has no such file, the hub data set in the last column is downloaded. A benchmark's name
is the `data_source` of its rows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agentrl.data.files import write_rows
from agentrl.errors import DataError
from agentrl.extras.datatools.instructions import AIME_INSTRUCTION, GSM8K_INSTRUCTION, MATH_INSTRUCTION
from agentrl.extras.datatools.originals import DataFile, OriginalSource, open_originals, read_originals
from agentrl.extras.datatools.problems import Problem, ProblemReader, read_aime, read_gsm8k, read_math
from agentrl.extras.datatools.task_rows import RowStyle, task_row, task_schema

FOLDER_VARIABLE = "AGENTRL_DATA"
"""Environment variable with the folder of original files."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark.

    Attributes:
        paths: possible paths of its file in the folder; the first that exists is read.
        split: name of the split on the hub.
        num_problems: as published.
    """

    name: str
    read: ProblemReader
    system: str
    paths: tuple[str, ...]
    hub_name: str
    split: str
    num_problems: int
    subset: str | None = None

    def files(self, folder: Path | None) -> list[DataFile]:
        """Return the files of its problems; raises as `find`."""
        place = folder or (Path(variable) if (variable := os.environ.get(FOLDER_VARIABLE)) else None)
        local = [place / path for path in self.paths] if place else []
        if found := next((path for path in local if path.is_file()), None):
            return [DataFile(found, "test")]
        if folder is not None:
            raise DataError(f"benchmark {self.name}: {str(folder)!r} has none of {', '.join(self.paths)}")
        try:
            files = open_originals(OriginalSource(self.hub_name, subset=self.subset, split=self.split))
        except DataError as error:
            looked = f"{str(place)!r} does not contain it" if place else f"{FOLDER_VARIABLE} is not set"
            raise DataError(
                f"benchmark {self.name}: put its file at {self.paths[0]} in the folder $AGENTRL_DATA "
                f"({looked}); {error}"
            ) from error
        # A benchmark is held out, whatever the hub calls its split
        return [DataFile(file.path, "test") for file in files]


def _paths(*stems: str) -> tuple[str, ...]:
    return tuple(f"{stem}{suffix}" for stem in stems for suffix in (".jsonl", ".parquet", ".json"))


BENCHMARKS: Mapping[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            "gsm8k",
            read_gsm8k,
            GSM8K_INSTRUCTION,
            _paths("gsm8k/test", "gsm8k_test"),
            "openai/gsm8k",
            "test",
            1319,
            subset="main",
        ),
        Benchmark(
            "aime_2024",
            read_aime,
            AIME_INSTRUCTION,
            _paths("aime/aime_2024", "aime_2024"),
            "Maxwell-Jia/AIME_2024",
            "train",
            30,
        ),
        Benchmark(
            "aime_2025",
            read_aime,
            AIME_INSTRUCTION,
            _paths("aime/aime_2025", "aime_2025"),
            "math-ai/aime25",
            "test",
            30,
        ),
        Benchmark(
            "math_500",
            read_math,
            MATH_INSTRUCTION,
            _paths("math_500/test", "math_500"),
            "HuggingFaceH4/MATH-500",
            "test",
            500,
        ),
    )
}


def find(name: str, folder: Path | None = None) -> list[Problem]:
    """Return the problems of a benchmark, in the order of its file.

    Args:
        name: one of BENCHMARKS.
        folder: folder of original files, laid out as above; None: AGENTRL_DATA, else the hub.

    Raises:
        DataError: there is no such benchmark, its file is not available, or a row of it cannot be read.
    """
    benchmark = BENCHMARKS.get(name)
    if benchmark is None:
        raise DataError(f"no benchmark {name!r}; known: {', '.join(BENCHMARKS)}, or a Parquet file of rows")
    return [benchmark.read(original) for original in read_originals(benchmark.files(folder))]


def write_benchmark(
    name: str, out_dir: str | Path, *, folder: Path | None = None, style: RowStyle | None = None
) -> Path:
    """Write the rows of a benchmark to `out_dir/NAME.parquet`, and return the path of this file.

    Args:
        style: prompt and agent of the rows; None: a single turn, with the benchmark's own instruction.

    Raises:
        DataError: as `find`.
    """
    problems = find(name, folder)
    style = style or RowStyle(system=BENCHMARKS[name].system)
    rows = (task_row(problem, style, data_source=name, ability="math") for problem in problems)
    target = Path(out_dir) / f"{name}.parquet"
    write_rows(target, rows, task_schema([style]))
    return target


gsm8k, aime_2024, aime_2025, math_500 = (partial(write_benchmark, name) for name in BENCHMARKS)
