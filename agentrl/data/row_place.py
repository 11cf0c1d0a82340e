"""Where a row is, for errors and for the task id."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.errors import DataError


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Location of a row, for errors and for the task id."""

    file: str
    file_id: str  # short, and unique among the dataset's files
    row: int
    line: int | None = None  # line of a text file, counted from 1

    @property
    def task_id(self) -> str:
        return f"{self.file_id}:{self.row}"

    def error(self, field: str, problem: str) -> DataError:
        return DataError(f"{self}: field {field!r}: {problem}")

    def __str__(self) -> str:
        return f"{self.file}: row {self.row}" + ("" if self.line is None else f" (line {self.line})")
