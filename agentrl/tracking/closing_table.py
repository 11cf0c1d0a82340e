"""The closing table of a run: one row per policy, from untrained to trained."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.table import Table

from agentrl.errors import CheckpointError, InfrastructureError
from agentrl.tracking.seals import read_document
from agentrl.types import BufferCounts

VALIDATIONS = "validations.json"
RESULT = "result.json"
TOOL_USE = "tool use where needed"
TRAINED = "final"
"""Name of the last validation of a run, and of its policy if that was not trained further."""
STEP = "val/step"
"""Step of a validation, among its metrics."""
UNSCORED = "not scored"


@dataclass(frozen=True, slots=True)
class ClosingRow:
    """The results of one policy's validation; None for values that were not measured.

    unscored: attempts without a score, out of num_attempts; accuracy is over the others.
    accuracy, tool_use (share of rows that need a tool and got a call): in [0, 1]; reward: mean;
    tokens_per_answer: mean tokens after the prompt.
    """

    policy: str
    accuracy: float | None = None
    accuracy_by_agent: Mapping[str, float] = field(default_factory=dict)
    tool_use: float | None = None
    reward: float | None = None
    tokens_per_answer: float | None = None
    unscored: int = 0
    num_attempts: int = 0

    @classmethod
    def from_values(cls, policy: str, values: Mapping[str, float]) -> ClosingRow:
        """Read the row from the metrics of a validation (`val/...`)."""
        prefix = "val/accuracy/"
        return cls(
            policy,
            accuracy=values.get("val/accuracy"),
            accuracy_by_agent={
                name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)
            },
            tool_use=values.get("val/tool_use/needs_tool"),
            reward=values.get("val/reward_mean"),
            tokens_per_answer=values.get("val/response_tokens/mean"),
            unscored=int(values.get("val/failed", 0)),
            num_attempts=int(values.get("val/trajectories", 0)),
        )


@dataclass(frozen=True, slots=True)
class ClosingTable:
    """The table: baselines first, the trained policy last. A column is shown if any row has it.

    notes: lines below the table.
    """

    rows: Sequence[ClosingRow]
    notes: Sequence[str] = ()

    def header(self) -> tuple[str, ...]:
        agents = sorted({agent for row in self.rows for agent in row.accuracy_by_agent})
        unscored = [UNSCORED] if any(row.unscored for row in self.rows) else []
        return ("policy", "accuracy", *unscored, *agents, TOOL_USE, "reward", "tokens per answer")

    def cells(self) -> list[tuple[str, ...]]:
        """Return one tuple of strings per row, in the order of `header`."""
        has_unscored = UNSCORED in self.header()
        agents = self.header()[2 + has_unscored : -3]
        return [
            (
                row.policy,
                _number(row.accuracy, 3),
                *([f"{row.unscored} of {row.num_attempts}"] if has_unscored else []),
                *(_number(row.accuracy_by_agent.get(agent), 3) for agent in agents),
                _number(row.tool_use, 2),
                _number(row.reward, 3),
                _number(row.tokens_per_answer, 1),
            )
            for row in self.rows
        ]

    def to_rich(self) -> Table:
        """Return the table for a terminal; the last row, the trained policy, is highlighted."""
        table = Table(
            title="validation",
            title_justify="left",
            title_style="bold",
            border_style="dim",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
        )
        for index, name in enumerate(self.header()):
            table.add_column(name, justify="left" if index == 0 else "right", no_wrap=index == 0)
        cells = self.cells()
        for index, row in enumerate(cells):
            table.add_row(*row, style="bold green" if index == len(cells) - 1 and index > 0 else "")
        return table

    def to_text(self) -> str:
        """Return the table as plain text with aligned columns."""
        lines = [self.header(), *self.cells()]
        widths = [max(len(line[index]) for line in lines) for index in range(len(lines[0]))]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if index else cell.ljust(width)
                for index, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        )

    def to_markdown(self) -> str:
        header = self.header()
        rule = ("---", *("---:" for _ in header[1:]))
        return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *self.cells()))


def closing_rows(results: Mapping[str, Mapping[str, float]], *, step: int) -> list[ClosingRow]:
    """Return a row for each validation, in the order of `results`.

    step: of the trained policy. A last validation of an earlier step is named by that step.
    """

    def name_of(name: str, values: Mapping[str, float]) -> str:
        validated = values.get(STEP, step)
        return name if name != TRAINED or validated == step else f"step {validated:.0f}"

    return [ClosingRow.from_values(name_of(name, values), values) for name, values in results.items()]


def read_validations(path: Path) -> dict[str, dict[str, float]]:
    """Return the metrics of a run's validations by policy (a baseline, `initial`, `final`).

    {} without a file.

    Raises:
        CheckpointError: the file is damaged.
    """
    found = read_document(path) if path.exists() else {}
    for name, values in found.items():
        if not isinstance(values, dict) or not all(isinstance(one, int | float) for one in values.values()):
            raise CheckpointError(f"{path} is damaged: {name!r} should be an object of numbers")
    return found


def read_result(path: Path) -> tuple[int, BufferCounts] | None:
    """Return the step and the groups by state of a run's result.json; None without a file.

    Raises:
        CheckpointError: the file is damaged.
    """
    if not path.exists():
        return None
    result = read_document(path)
    try:
        step, counts = result["step"], BufferCounts(**result["counts"])
        numbers = (step, counts.drawn, counts.consumed, *counts.dropped.values(), *counts.discarded.values())
        if not all(type(number) is int for number in numbers):
            raise ValueError(f"not all of {numbers} are integers")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: no result of a run ({error!r})") from error
    return step, counts


def write_summary(table: ClosingTable, path: Path, *, title: str) -> None:
    """Write the table, if it has rows, and one item per note as Markdown (`summary.md` of the run folder).

    Raises:
        InfrastructureError: the file cannot be written.
    """
    shown = table.to_markdown() if table.rows else "No validation was made."
    notes = (re.sub(r"^(\s*)", r"\1- ", note, count=1) for note in table.notes)
    lines = [f"# {title}", "", shown, "", *notes]
    try:
        path.write_text("\n".join(lines).rstrip() + "\n")
    except OSError as error:
        raise InfrastructureError(f"cannot write {path}: {error.strerror or error}") from error


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
