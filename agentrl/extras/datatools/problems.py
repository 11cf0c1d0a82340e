r"""Readers of public data sets, which convert rows to problems with question, ground truth and metadata.

There is one reader per data set. Its errors name the file, row and field that cannot be read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.data.row_values import plain
from agentrl.errors import DataError
from agentrl.extras.datatools.originals import Original

AIME_ANSWER = re.compile(r"0*[0-9]{1,3}")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?P<brace>\{)?")
_BRACES = re.compile(r"\\.|(?P<brace>[{}])", re.DOTALL)  # \{ and \} are ordinary characters


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with a ground truth.

    Attributes:
        id: the authors' name of the problem, else its index in the split.
        where: file and row, for messages.
        solution: the authors' solution; "": not known.
        difficulty, subject: in the authors' words; "": not known.
    """

    question: str
    ground_truth: str
    split: str
    index: int
    id: str
    where: str
    solution: str = ""
    difficulty: str = ""
    subject: str = ""


ProblemReader = Callable[[Original], Problem]


def read_gsm8k(original: Original) -> Problem:
    """Read `{question, answer}`; the ground truth is the number after the answer's last `####`.

    Raises:
        DataError: the row has another form.
    """
    question, answer = original.raw.get("question"), original.raw.get("answer")
    final = answer.rpartition("####")[2].strip() if isinstance(answer, str) and "####" in answer else ""
    if not isinstance(question, str) or not isinstance(answer, str) or not final:
        raise wrong(original, "needs `question` and an `answer` that ends with `#### number`")
    return make_problem(original, question, final.replace(",", ""), solution=answer)


def read_aime(original: Original) -> Problem:
    """Read `{id, problem, answer}` or `{ID, Problem, Solution, Answer}`, with an answer from 0 to 999.

    Raises:
        DataError: the row has another form.
    """
    raw = {key.lower(): value for key, value in original.raw.items()}
    question, answer = first(raw, "problem", "question"), str(raw.get("answer"))
    if not isinstance(question, str) or not AIME_ANSWER.fullmatch(answer):
        raise wrong(original, f"needs a `problem` and an `answer` from 0 to 999 (got {answer[:80]!r})")
    return make_problem(original, question, answer, solution=raw.get("solution"), id=raw.get("id"))


def read_math(original: Original) -> Problem:
    """Read `{problem, solution, answer, level, subject or type}`.

    A missing answer is taken from the solution's box.

    Raises:
        DataError: the row has another form.
    """
    raw = original.raw
    question, solution, answer = raw.get("problem"), raw.get("solution"), raw.get("answer")
    if answer is None and isinstance(solution, str):
        answer = boxed_answer(solution)
    if not isinstance(question, str) or answer is None or not str(answer).strip():
        raise wrong(original, r"needs a `problem` and an `answer`, or a `solution` with one in \boxed{}")
    level, subject = raw.get("level"), first(raw, "subject", "type")
    difficulty = f"Level {level}" if isinstance(level, int) else level
    name = first(raw, "unique_id", "id")
    return make_problem(
        original, question, str(answer), solution=solution, difficulty=difficulty, subject=subject, id=name
    )


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a data set of any form; None: there is no such column."""

    prompt: str
    answer: str | None
    difficulty: str | None = None
    id: str | None = None

    def read(self, original: Original) -> Problem:
        """Read one row. The prompt is a text, or a single user message; only difficulty and id may be null.

        Raises:
            DataError: a column is missing, null or of another form.
        """
        question = _question(original, self.prompt)
        answer = "" if self.answer is None else _required(original, self.answer)
        truth = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
        difficulty, name = (
            None if column is None else _column(original, column) for column in (self.difficulty, self.id)
        )
        return make_problem(original, question, truth, difficulty=difficulty, id=name)


def boxed_answer(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{...}` of a text, or the word after `\boxed`.

    Returns None if there is none.
    """
    for box in reversed(list(_BOX.finditer(text))):
        if not box["brace"]:
            return re.split(r"[\s$]", text[box.end() :], maxsplit=1)[0].rstrip(".,") or None
        depth = 1
        for token in _BRACES.finditer(text, box.end()):
            depth += {"{": 1, "}": -1}.get(token["brace"], 0)
            if depth == 0:
                return text[box.end() : token.start()]
    return None


# ----------------------------------------------------------------------------------------------------- fields


def make_problem(original: Original, question: str, truth: str, **known: Any) -> Problem:
    """Return the problem of a row; `known` are further fields, None: not known.

    Raises:
        DataError: the question is empty.
    """
    if not question.strip():
        raise wrong(original, "has an empty question")
    texts = {name: "" if value is None else str(value) for name, value in known.items()}
    name = texts.pop("id", "") or str(original.index)
    return Problem(question, truth, original.split, original.index, name, str(original.place), **texts)


def _question(original: Original, column: str) -> str:
    value = _required(original, column)
    if (
        isinstance(value, list)
        and len(value) == 1
        and isinstance(value[0], Mapping)
        and value[0].get("role") == "user"
    ):
        value = value[0].get("content")
    if not isinstance(value, str):
        raise original.place.error(
            column, f"must be text, or chat messages with exactly one user message, is {str(value)[:80]!r}"
        )
    return value


def _column(original: Original, column: str) -> Any:
    if column not in original.raw:
        raise original.place.error(column, f"is missing; the row has {', '.join(original.raw)}")
    return original.raw[column]


def _required(original: Original, column: str) -> Any:
    value = _column(original, column)
    if value is None:
        raise original.place.error(column, "is null")
    return plain(value, original.place, column)


def first(raw: Mapping[str, Any], *names: str) -> Any:
    """Return the value of the first column that is not null; None if there is none."""
    return next((raw[name] for name in names if raw.get(name) is not None), None)


def wrong(original: Original, problem: str) -> DataError:
    """Return an error about a row that does not fit its reader."""
    return DataError(f"{original.place}: {problem}")
