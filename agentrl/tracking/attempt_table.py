"""A table of sampled attempts of a validation, for the trackers."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest

from agentrl.terminal_text import visible
from agentrl.tracking.conversation_text import message_lines, shortened
from agentrl.types import SCORED_OUTCOMES, Trajectory

TABLE_NAME = "val/attempts"
"""Name of the table in every tracker."""
MAX_CONVERSATION_CHARS = 4_000
MAX_CELL_CHARS = 300
_TIMES = ("generate_s", "tool_s", "interaction_s", "reward_s")

Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """An attempt in the table. Its field names are the columns; texts are shortened.

    reward: None if the attempt has no score. seconds: waits for servers, tools, partner and rewards.
    """

    task_id: str
    data_source: str
    agent_name: str
    outcome: str
    reward: float | None
    num_turns: int
    num_response_tokens: int
    num_tool_calls: int
    seconds: float
    failure: str
    conversation: str

    @classmethod
    def of(cls, attempt: Trajectory) -> AttemptRow:
        conversation = "\n".join(line for message in attempt.messages for line in message_lines(message))
        return cls(
            task_id=_cell(attempt.task_id),
            data_source=_cell(attempt.data_source),
            agent_name=_cell(attempt.agent_name),
            outcome=attempt.outcome.value,
            reward=attempt.reward if attempt.outcome in SCORED_OUTCOMES else None,
            num_turns=int(attempt.metrics.get("num_turns", 0)),
            num_response_tokens=attempt.num_response_tokens,
            num_tool_calls=int(attempt.metrics.get("num_tool_calls", 0)),
            seconds=round(sum(attempt.metrics.get(name, 0.0) for name in _TIMES), 3),
            failure="" if attempt.failure is None else _cell(str(attempt.failure)),
            conversation=_clean(conversation, MAX_CONVERSATION_CHARS),
        )

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(getattr(self, name) for name in COLUMNS)


COLUMNS = tuple(field.name for field in fields(AttemptRow))


@dataclass(frozen=True, slots=True)
class SampledAttempts:
    """Sampled attempts of the validation at `step`, which measured `version`."""

    step: int
    version: int
    rows: tuple[AttemptRow, ...]

    @classmethod
    def of(cls, attempts: Sequence[Trajectory], *, step: int, version: int, limit: int) -> SampledAttempts:
        """Return a table of at most `limit` attempts (see `sampled`)."""
        return cls(step, version, tuple(AttemptRow.of(attempt) for attempt in sampled(attempts, limit)))

    def to_json(self) -> str:
        """Return the table as JSON: `columns`, and `data` with a list per row."""
        return json.dumps({"columns": COLUMNS, "data": [row.cells for row in self.rows]}, ensure_ascii=False)

    def to_markdown(self) -> str:
        """Return the table without conversations, then each conversation as a block of code."""
        columns = COLUMNS[:-1]
        head = [_line(columns), _line(["---"] * len(columns))]
        parts = ["\n".join([*head, *(_line(map(_shown, row.cells[:-1])) for row in self.rows)])]
        for row in self.rows:
            block = "\n".join(f"    {line}" for line in row.conversation.split("\n"))
            parts.append(f"**{_shown(row.task_id)}**\n\n{block}")
        return "\n\n".join(parts)


def sampled(attempts: Sequence[Trajectory], limit: int) -> list[Trajectory]:
    """Return at most `limit` attempts, the same tasks in every validation of a run.

    Data sources take turns. Within one, the tasks are spread evenly over its rows, failed attempts included;
    a task's second attempt is only taken if there are fewer tasks than rows of the table.
    """
    by_source: dict[str, list[Trajectory]] = {}
    for attempt in sorted(attempts, key=lambda one: (one.member, one.group_id)):
        by_source.setdefault(attempt.data_source, []).append(attempt)
    turns = zip_longest(*(_spread(own, limit) for _, own in sorted(by_source.items())))
    return [attempt for turn in turns for attempt in turn if attempt is not None][:limit]


def _spread(attempts: Sequence[Trajectory], limit: int) -> Iterator[Trajectory]:
    """Yield `limit` first members spread evenly, or all attempts if there are fewer."""
    first = [attempt for attempt in attempts if attempt.member == attempts[0].member]
    if len(first) <= limit:
        yield from attempts[:limit]
    else:
        yield from (first[index * len(first) // limit] for index in range(limit))


def _cell(text: str) -> str:
    return _clean(text, MAX_CELL_CHARS)


def _clean(text: str, max_chars: int) -> str:
    """Return a text that every tracker can store: short, in UTF-8, without control characters."""
    short = shortened(text, max_chars).encode(errors="replace").decode()
    return visible(short)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _shown(cell: Cell) -> str:
    """Return a cell as Markdown that cannot end its cell, and that no browser reads as a tag."""
    if cell is None:
        return ""
    text = f"{cell:g}" if isinstance(cell, float) else str(cell)
    text = html.escape(" ".join(text.split()), quote=False)
    return "".join(f"\\{mark}" if mark in "\\|*_`[]" else mark for mark in text)
