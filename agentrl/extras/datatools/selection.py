"""Selection of a data set's rows, and of their splits: duplicates, a held-out share, a band of difficulty."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from agentrl.data.files import RawRow
from agentrl.errors import DataError

HELD_OUT = ("test", "validation", "valid", "val", "dev")
"""Splits for measuring. Their rows take precedence over
duplicates in other splits, and are not filtered by difficulty.
"""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A row that may be written.

    Rows with the same `question` stay in one split. Rows with the same `identity` are duplicates.
    """

    row: RawRow
    split: str
    question: str
    identity: str
    answer: str

    def moved(self, split: str) -> Candidate:
        return replace(
            self, split=split, row={**self.row, "extra_info": {**self.row["extra_info"], "split": split}}
        )


PassRate = Callable[[Candidate], float | None]
"""The share of right attempts among a row's earlier attempts; None if there were none."""


@dataclass(frozen=True, slots=True)
class Band:
    """Band of pass rates to keep, both ends included.

    `unattempted`: what to do with rows without attempts.
    """

    pass_rate: PassRate
    low: float = 0.0
    high: float = 1.0
    unattempted: Literal["keep", "drop"] = "drop"

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.high <= 1.0:
            raise DataError(
                f"pass rates from {self.low:g} to {self.high:g}: both must be from 0 to 1, in ascending order"
            )


@dataclass(frozen=True, slots=True)
class Selection:
    """Filters, applied in the order of the fields.

    `test_share`: share of the questions to hold out, in [0, 1]; 0: the splits stay unchanged.
    """

    deduplicate: bool = False
    test_share: float = 0.0
    seed: int = 0
    band: Band | None = None


def normalise(text: str) -> str:
    """Return a question with letter case and spacing normalised."""
    return " ".join(text.casefold().split())


def select(candidates: Sequence[Candidate], selection: Selection) -> tuple[list[Candidate], list[str]]:
    """Return the remaining rows, in the given order, and notes for the user about each filter.

    Raises:
        DataError: no row is left, or `test_share` is given for a data set that has several splits.
    """
    notes: list[str] = []
    kept, found = _deduplicated(candidates)
    if found:
        notes.append(
            f"{found}: {'left out' if selection.deduplicate else 'kept; --deduplicate leaves them out'}"
        )
    kept = kept if selection.deduplicate else list(candidates)
    if selection.test_share:
        kept = hold_out(kept, selection.test_share, seed=selection.seed)
    if selection.band is not None:
        kept, note = _in_band(kept, selection.band)
        notes.append(note)
    if not kept:
        raise DataError("; ".join(["no row is left", *notes]))
    return kept, notes


# ------------------------------------------------------------------------------------------------- duplicates


def _deduplicated(candidates: Sequence[Candidate]) -> tuple[list[Candidate], str]:
    """Keep the first row of each identity; rows of held-out splits take precedence.

    Returns the kept rows, and how many repeat another one, in words; "" if none does.
    """
    order = sorted(range(len(candidates)), key=lambda index: candidates[index].split not in HELD_OUT)
    first: dict[str, Candidate] = {}
    kept, conflicting, across = [], 0, 0
    for index in order:
        candidate = candidates[index]
        earlier = first.setdefault(candidate.identity, candidate)
        if earlier is candidate:
            kept.append(index)
        conflicting += earlier.answer != candidate.answer
        across += earlier.split != candidate.split
    facts = ((conflicting, "with another answer"), (across, "of another split"))
    beside = ", ".join(f"{count:,} {what}" for count, what in facts if count)
    num = len(order) - len(kept)
    found = f"{num:,} row{'s repeat' if num != 1 else ' repeats'} another one" if num else ""
    return [candidates[index] for index in sorted(kept)], found + (f" ({beside})" if beside else "")


# --------------------------------------------------------------------------------------------- held-out share


def hold_out(candidates: Sequence[Candidate], share: float, *, seed: int) -> list[Candidate]:
    """Divide the rows of one split into `train` and `test`, by question.

    A share of the questions, at least one, becomes `test`; all rows of a question stay together.

    Raises:
        DataError: there are several splits, or too few questions for two.
    """
    splits = list(dict.fromkeys(candidate.split for candidate in candidates))
    if len(splits) > 1:
        raise DataError(
            f"--test-share divides one split, but the data has {', '.join(splits)}: choose one with --split"
        )
    questions = list(dict.fromkeys(candidate.question for candidate in candidates))
    num_test = max(1, round(share * len(questions)))
    if not 0.0 < share < 1.0 or num_test >= len(questions):
        raise DataError(
            f"--test-share={share:g} of {len(questions)} questions leaves none to train on; use a smaller "
            "share"
        )
    test = set(random.Random(seed).sample(questions, num_test))
    return [candidate.moved("test" if candidate.question in test else "train") for candidate in candidates]


# ------------------------------------------------------------------------------------------------- difficulty


def _in_band(candidates: Sequence[Candidate], band: Band) -> tuple[list[Candidate], str]:
    kept: list[Candidate] = []
    counts: dict[str, int] = dict.fromkeys(("in", "below", "above", "unattempted", "held_out"), 0)
    for candidate in candidates:
        where = _place_in(band, candidate)
        counts[where] += 1
        if where in ("in", "held_out") or (where == "unattempted" and band.unattempted == "keep"):
            kept.append(candidate)
    parts = [f"{counts['in']:,} kept", f"{counts['below']:,} below and {counts['above']:,} above left out"]
    if counts["unattempted"]:
        parts.append(
            f"{counts['unattempted']:,} without attempts "
            f"{'kept' if band.unattempted == 'keep' else 'left out'}"
        )
    if counts["held_out"]:
        parts.append(f"{counts['held_out']:,} of held-out splits kept")
    return kept, f"pass rates from {band.low:g} to {band.high:g}: {', '.join(parts)}"


def _place_in(band: Band, candidate: Candidate) -> str:
    if candidate.split in HELD_OUT:
        return "held_out"
    rate = band.pass_rate(candidate)
    if rate is None:
        return "unattempted"
    return "below" if rate < band.low else "above" if rate > band.high else "in"


def splits_of(candidates: Sequence[Candidate]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each split; splits are in the order of their first row."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for candidate in candidates:
        rows.setdefault(candidate.split, []).append(candidate.row)
    return rows
