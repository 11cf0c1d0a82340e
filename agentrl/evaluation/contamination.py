"""Detection of evaluation questions that a training set contains word for word.

Two texts overlap if they share 13 consecutive words, as in Brown et al. 2020 (arXiv:2005.14165, appendix C),
compared in lower case and without punctuation. A question of 8 to 12 words must occur as a whole. A shorter
question counts only if it is an entire training message, because short phrases recur by chance. Words that
all questions of a source share at their beginning or end are the prompt template and never count. Neither
does a phrase of more than MAX_SHARED questions.

Questions that were translated, paraphrased or given other numbers are not found: the result is a lower bound.
"""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from agentrl.data.files import batches, open_rows
from agentrl.data.row_values import structure
from agentrl.errors import DataError

NGRAM_WORDS = 13
MIN_NGRAM_WORDS = 8
"""Brown et al. 2020 use 8 to 13 words, depending on the length of a benchmark's shorter examples."""
MAX_SHARED = 3
"""A phrase of more questions than this is an instruction
or a common opening, and not specific to one question.
"""
NEARLY_WHOLE = 0.8
"""A question counts as nearly whole if at least this share of its words is in one training row."""
NUM_WORST = 10
EXCERPT_CHARS = 160
STREAM_ROWS = 2048

_WORD = re.compile(r"\w+")
_UNKNOWN = 0  # id of all words that occur in no question
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so multiplication modulo 2**64 is invertible and loses no bit


@dataclass(frozen=True, slots=True)
class Question:
    """The question of one problem: the text that the model read, template included."""

    source: str
    problem: str
    text: str


@dataclass(frozen=True, slots=True)
class Overlap:
    """The training row that contains most of a question.

    Attributes:
        share: share of the question's words, in (0, 1].
        row: index in the file, from 0.
    """

    source: str
    problem: str
    share: float
    file: str
    row: int
    excerpt: str


@dataclass(frozen=True, slots=True)
class SourceOverlap:
    """Number of a source's questions that overlap with the training set, and that are nearly whole in it."""

    source: str
    num_questions: int
    num_overlapping: int
    num_nearly_whole: int


@dataclass(frozen=True, slots=True)
class ContaminationNote:
    """What was compared, and the findings; `worst` is ordered by decreasing share."""

    files: tuple[str, ...]
    num_rows: int
    sources: tuple[SourceOverlap, ...]
    worst: tuple[Overlap, ...]

    @property
    def num_overlapping(self) -> int:
        return sum(source.num_overlapping for source in self.sources)


def find_overlap(
    questions: Sequence[Question], training_files: Sequence[str], *, prompt_key: str = "prompt"
) -> ContaminationNote:
    """Compare `questions` with the prompts of `training_files`, which are streamed once.

    Args:
        training_files: Parquet or JSON lines.
        prompt_key: column of a training row with the chat messages, or the text.

    Raises:
        DataError: a file is missing, cannot be read, or has no such column.
    """
    index = _Index(questions)
    best: dict[int, Overlap] = {}
    num_rows = 0
    for file in training_files:
        for first_row, texts in _batches(file, prompt_key):
            num_rows += len(texts)
            for place, question, share in index.find(texts):
                if question not in best or share > best[question].share:
                    asked = questions[question]
                    best[question] = Overlap(
                        asked.source, asked.problem, share, file, first_row + place, _excerpt(asked.text)
                    )
    worst = sorted(best.values(), key=lambda found: (-found.share, found.source, found.problem))[:NUM_WORST]
    return ContaminationNote(tuple(training_files), num_rows, _by_source(questions, best), tuple(worst))


def refuse_unreadable(training_files: Sequence[str], *, prompt_key: str = "prompt") -> None:
    """Read the first rows of each file, to find errors before any attempt is played.

    Raises:
        DataError: as `find_overlap`.
    """
    for file in training_files:
        next(_batches(file, prompt_key), None)


def words(text: str) -> list[str]:
    """Return the words of a text, normalised for comparison: NFKC, lower case, without punctuation."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())


def _by_source(questions: Sequence[Question], best: Mapping[int, Overlap]) -> tuple[SourceOverlap, ...]:
    shares: defaultdict[str, list[float]] = defaultdict(list)
    for place, question in enumerate(questions):
        shares[question.source].append(best[place].share if place in best else 0.0)
    return tuple(
        SourceOverlap(
            source, len(own), sum(share > 0 for share in own), sum(share >= NEARLY_WHOLE for share in own)
        )
        for source, own in sorted(shares.items())
    )


def _excerpt(text: str) -> str:
    one_line = " ".join(text.split())
    return one_line if len(one_line) <= EXCERPT_CHARS else one_line[: EXCERPT_CHARS - 1] + "…"


# -------------------------------------------------------------------------------------------------- the index


class _Index:
    """All phrases of all questions, with their positions.

    Words are small integers. A training batch is one array of words, whose windows are hashed at once. A
    matching hash is looked up by its words, so a hash collision cannot cause a false match.
    """

    def __init__(self, questions: Sequence[Question]) -> None:
        own_words = _without_templates(questions)
        self._ids: dict[str, int] = {}
        for word in itertools.chain.from_iterable(own_words):
            self._ids.setdefault(word, len(self._ids) + 1)
        self._num_words = [len(own) for own in own_words]
        # Phrase -> (question, index of its first word)
        self._phrases: defaultdict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        # Questions that are too short for a phrase
        self._whole: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for place, own in enumerate(own_words):
            self._add(place, tuple(self._ids[word] for word in own))
        common = [
            phrase
            for phrase, found in self._phrases.items()
            if len({question for question, _ in found}) > MAX_SHARED
        ]
        for phrase in common:
            del self._phrases[phrase]
        by_length: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        for phrase in self._phrases:
            by_length[len(phrase)].append(phrase)
        self._hashes = {
            length: np.unique(_hash(np.array(phrases, np.uint64).T))
            for length, phrases in sorted(by_length.items())
        }

    def _add(self, question: int, ids: tuple[int, ...]) -> None:
        if 0 < len(ids) < MIN_NGRAM_WORDS:
            self._whole[ids].append(question)
            return
        length = min(NGRAM_WORDS, len(ids))
        for first in range(len(ids) - length + 1) if ids else ():
            self._phrases[ids[first : first + length]].append((question, first))

    def find(self, texts: Sequence[Sequence[str]]) -> Iterator[tuple[int, int, float]]:
        """Yield (index of the text, question, share of the question's words) for every pair that overlaps.

        A text is given as its messages.
        """
        rows = [
            (place, [self._ids.get(word, _UNKNOWN) for word in words(part)])
            for place, parts in enumerate(texts)
            for part in parts
        ]
        for place, ids in rows:
            for question in self._whole.get(tuple(ids), ()) if len(ids) < MIN_NGRAM_WORDS else ():
                yield place, question, 1.0
        # An unknown word ends every message, so no window reaches into the next message.
        flat = np.fromiter(itertools.chain.from_iterable((*ids, _UNKNOWN) for _, ids in rows), np.uint64)
        owners = np.repeat([place for place, _ in rows], [len(ids) + 1 for _, ids in rows])
        covered: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        for length, known in self._hashes.items():
            num_windows = max(0, len(flat) - length + 1)
            windows = _hash([flat[place : place + num_windows] for place in range(length)])
            nearest = known[np.minimum(np.searchsorted(known, windows), len(known) - 1)]
            for start in np.flatnonzero(nearest == windows).tolist():
                for question, first in self._phrases.get(tuple(flat[start : start + length].tolist()), ()):
                    covered[int(owners[start]), question].update(range(first, first + length))
        for (place, question), own in covered.items():
            yield place, question, len(own) / self._num_words[question]


def _without_templates(questions: Sequence[Question]) -> list[list[str]]:
    """Return each question's words without the prompt template.

    The template is the beginning and end that all different questions of a source share.
    """
    all_words = [words(question.text) for question in questions]
    by_source: defaultdict[str, list[list[str]]] = defaultdict(list)
    for question, own in zip(questions, all_words, strict=True):
        by_source[question.source].append(own)
    cuts = {source: _template(texts) for source, texts in by_source.items()}
    return [
        own[cuts[q.source][0] : len(own) - cuts[q.source][1]]
        for q, own in zip(questions, all_words, strict=True)
    ]


def _template(texts: Sequence[Sequence[str]]) -> tuple[int, int]:
    """Return how many words all texts share at the beginning and at the end.

    Returns (0, 0) for a single distinct text.
    """
    distinct = sorted({tuple(text) for text in texts})
    if len(distinct) < 2:
        return 0, 0
    shortest = min(map(len, distinct))
    head = _num_common(distinct, shortest)
    return head, _num_common([text[::-1] for text in distinct], shortest - head)


def _num_common(texts: Sequence[Sequence[str]], limit: int) -> int:
    columns = zip(*(text[:limit] for text in texts), strict=True)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


def _hash(words: Iterable[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    """Return u64[P], a polynomial hash modulo 2**64 of P phrases. `words`: their first words, then their
    second, ..., u64[P] each.
    """
    return functools.reduce(lambda hashes, word: hashes * _BASE + word, words)


# ---------------------------------------------------------------------------------------------- training rows


def _batches(file: str, prompt_key: str) -> Iterator[tuple[int, list[list[str]]]]:
    """Yield (index of the first row, the messages of each row) for each batch of a file, in order."""
    first = 0
    for values in _prompts(file, prompt_key):
        yield first, [_texts(value, file, first + place, prompt_key) for place, value in enumerate(values)]
        first += len(values)


def _prompts(file: str, prompt_key: str) -> Iterator[list[Any]]:
    if Path(file).suffix != ".parquet":
        rows = open_rows(file)
        prompts = (row.get(prompt_key) for row in rows.rows(len(rows)))
        yield from map(list, batches(prompts, STREAM_ROWS))
        return
    open_rows(file)  # raises the proper error for a missing or broken file
    with pq.ParquetFile(file) as parquet:  # reads only one of possibly many columns
        if prompt_key not in parquet.schema_arrow.names:
            raise DataError(
                f"training file {file!r} has no column {prompt_key!r}; it has "
                f"{', '.join(parquet.schema_arrow.names)}"
            )
        try:
            for record in parquet.iter_batches(batch_size=STREAM_ROWS, columns=[prompt_key]):
                yield record.column(0).to_pylist()
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"training file {file!r} cannot be read as Parquet: {error}") from error


def _texts(value: Any, file: str, row: int, prompt_key: str) -> list[str]:
    value = structure(value)
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(message, Mapping) for message in value):
        return [message["content"] for message in value if isinstance(message.get("content"), str)]
    raise DataError(
        f"{file}: row {row}: field {prompt_key!r}: must be text or a list of messages, is "
        f"{type(value).__name__}"
    )
