"""Show a file of rows on the terminal: columns, counts per data source and agent, and rows as conversations.

Task rows, pairs of answers, conversations to imitate and trajectories are distinguished by their columns.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.data.files import RawRow, open_rows, read_batch
from agentrl.data.row_place import RowPlace
from agentrl.data.row_values import plain, structure
from agentrl.errors import DataError

ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
CONVERSATIONS = ("prompt", "messages", "chosen", "rejected")
"""Columns with chat messages, or with texts."""
TOKEN_COLUMNS = ("token_ids", "action_mask", "behavior_logprobs", "versions", "turn_ids", "anchors")
"""Columns of trajectories with numbers per token, of which only the length is shown."""
MAX_VALUE_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Facts:
    """Figures of one row.

    Attributes:
        chars: characters of the prompt, or of the messages if there is no prompt.
        tokens, turns: of trajectories.
    """

    source: str
    agent: str
    chars: int
    tokens: int | None = None
    turns: float | None = None
    accuracy: float | None = None
    outcome: str | None = None


def choose_rows(count: int, *, row: int | None, is_random: bool, first: int) -> Sequence[int]:
    """Return the indices of the rows to show: the given one, a random one, or the first ones.

    Raises:
        DataError: the file has no such row.
    """
    if row is not None and row >= count:
        raise DataError(f"--row={row}: the file has {count:,} rows, counted from 0")
    if row is not None:
        return [row]
    return [random.randrange(count)] if is_random and count else range(min(first, count))


def show_file(path: Path, choose: Callable[[int], Sequence[int]], console: Console) -> None:
    """Print a file; `choose` maps the number of rows to the indices to show.

    Raises:
        DataError: the file cannot be read.
    """
    rows = open_rows(str(path))
    chosen = choose(len(rows))
    console.rule(
        Text(f"{path}: {len(rows):,} row{'' if len(rows) == 1 else 's'}, {path.stat().st_size / 1e6:,.1f} MB")
    )
    console.print(columns_table(path))
    facts = _all_facts(path)
    if any(fact.source or fact.chars for fact in facts):
        console.print(counts_table(facts))
    for index in chosen:
        console.rule(f"row {index}")
        _show_row(rows.row(index), RowPlace(str(path), path.stem, index, rows.line(index)), console)


# --------------------------------------------------------------------------------------------- the whole file


def columns_table(path: Path) -> Table:
    """Return the columns with their types; for JSON lines, the types in the first rows."""
    table = Table("column", "type")
    for name, kind in _columns(path):
        table.add_row(Text(name), Text(kind))  # Text, because a str such as [int32] would be read as markup
    return table


def _columns(path: Path) -> Iterator[tuple[str, str]]:
    if path.suffix != ".parquet":
        rows = open_rows(str(path))
        kinds: dict[str, dict[str, None]] = {}
        for row in rows.rows(100):
            for name, value in row.items():
                kinds.setdefault(name, {})[type(value).__name__] = None
        yield from ((name, " or ".join(found)) for name, found in kinds.items())
        return
    for field in pq.read_schema(path):
        yield field.name, short_type(field.type)


def short_type(kind: pa.DataType) -> str:
    """Return a type in one line: `[{role, content}]` for a list of objects with these fields."""
    if pa.types.is_struct(kind):
        return "{" + ", ".join(field.name for field in kind) + "}"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"[{short_type(kind.value_type)}]"
    if pa.types.is_map(kind):
        return f"{{{short_type(kind.key_type)}: {short_type(kind.item_type)}}}"
    return str(kind).removeprefix("large_")


def counts_table(facts: Sequence[Facts]) -> Table:
    """Return rows, lengths and results of each data source and agent."""
    has_attempts = any(fact.outcome is not None for fact in facts)
    table = Table(
        "data source", "agent", "rows", "chars: median", "longest", *_ATTEMPTS if has_attempts else ()
    )
    groups: dict[tuple[str, str], list[Facts]] = {}
    for fact in facts:
        groups.setdefault((fact.source, fact.agent), []).append(fact)
    for (source, agent), group in groups.items():
        chars = [fact.chars for fact in group]
        cells = [
            source or "-",
            agent or "-",
            f"{len(group):,}",
            f"{statistics.median(chars):,.0f}",
            f"{max(chars):,}",
        ]
        table.add_row(*map(Text, cells + (_attempt_cells(group) if has_attempts else [])))
    return table


_ATTEMPTS = ("accuracy", "tokens", "turns", "outcomes")


def _attempt_cells(group: Sequence[Facts]) -> list[str]:
    outcomes: dict[str, int] = {}
    for fact in group:
        outcomes[fact.outcome or "-"] = outcomes.get(fact.outcome or "-", 0) + 1
    return [
        _mean([fact.accuracy for fact in group], ".3f"),
        _mean([fact.tokens for fact in group], ",.0f"),
        _mean([fact.turns for fact in group], ".1f"),
        ", ".join(f"{count:,} {name}" for name, count in outcomes.items()),
    ]


def _mean(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return format(statistics.fmean(known), form) if known else "-"


def _all_facts(path: Path) -> list[Facts]:
    if path.suffix != ".parquet":
        rows = open_rows(str(path))
        return [_facts(row) for row in rows.rows(len(rows))]
    facts: list[Facts] = []
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        columns = [name for name in names if name not in TOKEN_COLUMNS[1:]]
        for batch in file.iter_batches(batch_size=256, columns=columns):
            known = batch.select([name for name in columns if name not in TOKEN_COLUMNS])
            plain_rows = read_batch(known, str(path), len(facts))
            lengths = (
                batch.column("token_ids").value_lengths().to_pylist()
                if "token_ids" in columns
                else [None] * len(plain_rows)
            )
            facts += [_facts(row, tokens) for row, tokens in zip(plain_rows, lengths, strict=True)]
    return facts


def _facts(row: RawRow, tokens: int | None = None) -> Facts:
    column = next((name for name in CONVERSATIONS if row.get(name) is not None), None)
    metrics = row.get("metrics") if tokens is not None else None
    metrics = metrics if isinstance(metrics, Mapping) else {}
    return Facts(
        source=str(row.get("data_source") or ""),
        agent=str(row.get("agent_name") or ""),
        chars=0 if column is None else _num_chars(structure(row[column])),
        tokens=tokens,
        turns=metrics.get("num_turns"),
        accuracy=metrics.get("accuracy"),
        outcome=row.get("outcome") if tokens is not None else None,
    )


def _num_chars(value: Any) -> int:
    if not isinstance(value, list):
        return len(str(value))
    return sum(
        len(str(message.get("content") or "")) if isinstance(message, Mapping) else len(str(message))
        for message in value
    )


# ---------------------------------------------------------------------------------------------------- one row


def _show_row(row: RawRow, place: RowPlace, console: Console) -> None:
    for name in CONVERSATIONS:
        if row.get(name) is not None:
            console.print(Text(name, style="bold"))
            value, refusal = _read(name, row[name], place)
            console.print(Text("\n").join(conversation(value)) + Text(refusal))
    for name, value in row.items():
        if name not in CONVERSATIONS and value is not None:
            console.print(Text.assemble((f"{name}: ", "bold"), _value(name, value, place)))


def conversation(value: Any) -> list[Text]:
    """Return chat messages as texts with their roles; a plain text gives one item."""
    messages = value if isinstance(value, list) else [value]
    return [_message(message) if isinstance(message, Mapping) else Text(str(message)) for message in messages]


def _message(message: Mapping[str, Any]) -> Text:
    role = str(message.get("role"))
    line = Text.assemble((f"{role:>12}  ", ROLE_STYLES.get(role, "")))
    if reasoning := message.get("reasoning") or message.get("reasoning_content"):
        line.append(f"({str(reasoning).strip()}) ", style="italic dim")
    line.append(_short(message.get("content") or ""))
    for call in message.get("tool_calls") or []:
        function = call.get("function") or call
        line.append(
            f"\n{'':>14}-> {function.get('name')}({_short(function.get('arguments'))})", style="yellow"
        )
    return line


def _value(name: str, value: Any, place: RowPlace) -> str:
    if name in TOKEN_COLUMNS:
        return f"{len(value):,} values"
    if name == "metrics" and isinstance(value, Mapping):
        return ", ".join(f"{key}={_short_number(number)}" for key, number in value.items())
    read, refusal = _read(name, value, place)
    return _short(read) + refusal


def _short_number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else _short(value)


def _read(name: str, value: Any, place: RowPlace) -> tuple[Any, str]:
    """Return a value as plugins get it, and why it is refused, in brackets; "" if it is not."""
    found = structure(value) if name in (*CONVERSATIONS, "extra_info", "reward_model") else value
    try:
        return plain(found, place, name), ""
    except DataError as error:
        return found, f" ({error})"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}... ({len(text):,} characters)"
