"""Reward for short answers to questions: equal to a true answer after SQuAD's normalisation.

Source: Rajpurkar et al. 2016 (SQuAD), arXiv:1606.05250, official evaluation script; Jin et al. 2025
    (Search-R1), arXiv:2503.09516, for the answer in `<answer>` tags.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping
from typing import Any, ClassVar

from agentrl.extras.answers.answer_number import MAX_TAIL_CHARS
from agentrl.extras.answers.boxed import MAX_MARKED_CHARS
from agentrl.extras.answers.readings import require_truth
from agentrl.extras.answers.thoughts import without_thoughts
from agentrl.plugins import Attempted, Reward, RewardResult
from agentrl.plugins.options import Options, read_options
from agentrl.plugins.rewards import RunsIn
from agentrl.types import JsonObject, Task

OPEN, CLOSE = "<answer>", "</answer>"

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class ExactMatchOptions(Options):
    """`needs_tags`: only the text in the last `<answer>` tags counts; false: without tags, the whole message.

    `format_score`: for a wrong answer in tags.
    """

    needs_tags: bool = True
    format_score: float = 0.0


class ExactMatch(Reward):
    """1 if the answer of the last assistant message is one of the true answers.

    The ground truth is a text, a list of texts, such a list as JSON, or {"target": ...} (Search-R1).
    Metrics: accuracy, format (there is an answer in tags). Details: answer. An answer submitted by `finish`
    needs no tags.
    """

    name: ClassVar[str] = "exact_match"
    runs_in: RunsIn = "inline"

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._options = read_options(ExactMatchOptions, self.config, plugin=f"reward {self.name!r}")

    def check(self, task: Task) -> None:
        what = "a text, or a list of texts"
        require_truth(task, self.name, is_given=bool(true_answers(task.ground_truth)), what=what)

    def score(self, attempt: Attempted) -> RewardResult:
        tagged = tagged_answer(attempt.answer) if attempt.handed_in is None else attempt.handed_in
        answer = tagged
        if answer is None and not self._options.needs_tags:
            answer = without_thoughts(attempt.answer)[-MAX_TAIL_CHARS:].strip()
        is_right = answer is not None and is_exact_match(answer, true_answers(attempt.task.ground_truth))
        wrong = 0.0 if tagged is None else self._options.format_score
        return RewardResult(
            1.0 if is_right else wrong,
            {"accuracy": float(is_right), "format": float(tagged is not None)},
            {"answer": answer or ""},
        )


def tagged_answer(text: str) -> str | None:
    """Return the text in the last closed `<answer>` tags outside of thoughts; None if there are none."""
    tail = without_thoughts(text)[-MAX_MARKED_CHARS:]
    end = tail.rfind(CLOSE)
    start = tail.rfind(OPEN, 0, end) if end >= 0 else -1
    return tail[start + len(OPEN) : end].strip() if start >= 0 else None


def is_exact_match(answer: str, truths: tuple[str, ...]) -> bool:
    """Return whether the answer is one of `truths`, regardless of case, punctuation, articles and spaces.

    An answer of which the normalisation leaves nothing matches nothing.
    """
    normal = normalize(answer)
    return bool(normal) and any(normal == normalize(truth) for truth in truths)


def normalize(text: str) -> str:
    """Return `text` in lower case, without ASCII punctuation, English articles and superfluous spaces."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def true_answers(ground_truth: Any) -> tuple[str, ...]:
    """Return the true answers that a row's ground truth names; () if it has another form."""
    if isinstance(ground_truth, Mapping):
        ground_truth = ground_truth.get("target")
    if isinstance(ground_truth, str):
        listed = _listed(ground_truth)
        ground_truth = [ground_truth] if listed is None else listed
    elif hasattr(ground_truth, "tolist"):  # an array, as pandas reads lists from Parquet
        ground_truth = ground_truth.tolist()
    if not isinstance(ground_truth, list | tuple) or not all(isinstance(t, str) for t in ground_truth):
        return ()
    return tuple(truth for truth in ground_truth if normalize(truth))


def _listed(text: str) -> list[Any] | None:
    """Return the list that a text is as JSON; None if it is none."""
    if not text.startswith("["):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None
