"""Convert published preference pairs to rows for `agentrl rm`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from agentrl.data.rows import read_messages
from agentrl.errors import DataError
from agentrl.extras.datatools.convert import Written, write_candidates
from agentrl.extras.datatools.originals import Original, OriginalSource, open_originals, read_originals
from agentrl.extras.datatools.selection import Candidate, Selection, normalise
from agentrl.extras.datatools.task_rows import PROMPT
from agentrl.types import Message

PAIR_SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", PROMPT),
        ("chosen", PROMPT),
        ("rejected", PROMPT),
        ("extra_info", pa.struct([("split", pa.string()), ("index", pa.int64())])),
    ]
)


def write_pairs(
    out: Path,
    source: OriginalSource,
    selection: Selection,
    *,
    data_source: str,
    prompt: str,
    chosen: str,
    rejected: str,
) -> Written:
    """Write `SPLIT.parquet` for each split.

    Args:
        prompt, chosen, rejected: columns, each a text or chat messages. Answers that are whole conversations
            may repeat the prompt. Without a prompt column, the prompt is the common beginning of both, up to
            the last turn.

    Raises:
        DataError: a row is malformed; the message names file, row and field. Nothing was written.
    """
    originals = read_originals(open_originals(source))
    candidates, num_equal = pair_candidates(
        originals, data_source=data_source, prompt=prompt, chosen=chosen, rejected=rejected
    )
    written = write_candidates(out, candidates, selection, PAIR_SCHEMA)
    note = (
        (f"{num_equal:,} pair{'' if num_equal == 1 else 's'} with equal answers left out",)
        if num_equal
        else ()
    )
    return Written(written.rows, (*note, *written.notes))


def pair_candidates(
    originals: Iterable[Original], *, data_source: str, prompt: str, chosen: str, rejected: str
) -> tuple[list[Candidate], int]:
    """Return the rows of pairs, and the number of pairs left out because both answers are equal.

    The rows are described in `write_pairs`.
    """
    candidates: list[Candidate] = []
    num_equal = 0
    for original in originals:
        asked = _messages(original, prompt, role="user") if original.raw.get(prompt) is not None else ()
        answers = [_messages(original, column, role="assistant") for column in (chosen, rejected)]
        asked = asked or _common(*answers)
        better, worse = (
            _behind(asked, answer, original, column)
            for answer, column in zip(answers, (chosen, rejected), strict=True)
        )
        if better == worse:
            num_equal += 1
            continue
        candidates.append(_candidate(original, data_source, asked, better, worse))
    return candidates, num_equal


def _messages(original: Original, column: str, *, role: Any) -> tuple[Message, ...]:
    value = original.raw.get(column)
    if isinstance(value, str):
        if not value.strip():
            raise original.place.error(column, "is empty")
        return (Message(role, value),)
    return read_messages(value, original.place, column)


def _common(chosen: Sequence[Message], rejected: Sequence[Message]) -> tuple[Message, ...]:
    """Return the common first turns of two conversations, leaving at least one turn of each."""
    count = 0
    while count < min(len(chosen), len(rejected)) - 1 and chosen[count] == rejected[count]:
        count += 1
    return tuple(chosen[:count])


def _behind(
    prompt: tuple[Message, ...], answer: tuple[Message, ...], original: Original, column: str
) -> tuple[Message, ...]:
    rest = answer[len(prompt) :] if answer[: len(prompt)] == prompt else answer
    if not prompt:
        raise original.place.error(
            column,
            "has no prompt: the row has no prompt column, and the two answers have no common beginning",
        )
    if not rest or rest[-1].role != "assistant":
        raise original.place.error(column, "must end with a message of the assistant")
    if any(message.tool_calls for message in (*prompt, *rest)):
        raise DataError(
            f"{original.place}: field {column!r}: this command does not keep tool calls; use the file with "
            "`agentrl rm` directly"
        )
    return rest


def _candidate(
    original: Original,
    data_source: str,
    prompt: Sequence[Message],
    chosen: Sequence[Message],
    rejected: Sequence[Message],
) -> Candidate:
    shown = [
        [{"role": message.role, "content": message.content} for message in part]
        for part in (prompt, chosen, rejected)
    ]
    texts = [normalise("\n".join(message.content for message in part)) for part in (prompt, chosen, rejected)]
    row = {
        "data_source": data_source,
        **dict(zip(("prompt", "chosen", "rejected"), shown, strict=True)),
        "extra_info": {"split": original.split, "index": original.index},
    }
    return Candidate(row, original.split, question=texts[0], identity="\x00".join(texts), answer="")
