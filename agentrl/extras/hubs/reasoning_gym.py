"""Reward of tasks of reasoning-gym: the generator's own scorer."""

from __future__ import annotations

import copy
import math
from functools import lru_cache
from typing import Any, ClassVar

from agentrl.errors import RewardError
from agentrl.extras.answers.answer_number import MAX_TAIL_CHARS
from agentrl.extras.answers.exact_match import tagged_answer
from agentrl.extras.answers.thoughts import without_thoughts
from agentrl.extras.hubs.evaluated_answers import ANSWER_FORMS, is_harmless
from agentrl.extras.hubs.generated import KEY, Generated
from agentrl.plugins import Attempted, Reward, RewardResult
from agentrl.plugins.options import Options, read_options
from agentrl.plugins.rewards import RunsIn
from agentrl.types import JsonObject, Task


class ReasoningGymOptions(Options):
    """`needs_tags`: only the text in the last `<answer>` tags counts; false: without tags, the whole
    message.
    """

    needs_tags: bool = True


class ReasoningGym(Reward):
    """The score of reasoning-gym's `score_answer`, from 0 to 1, for the text in the last `<answer>` tags.

    Metrics: accuracy (the score is 1), format (there is an answer in tags). Details: answer. An answer
    submitted by `finish` needs no tags. An answer at which the scorer fails, or takes too long, gets 0.
    """

    name: ClassVar[str] = KEY
    runs_in: RunsIn = "process"
    max_answer_cpu_s: int | None = 5

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._options = read_options(ReasoningGymOptions, self.config, plugin=f"reward {self.name!r}")

    def check(self, task: Task) -> None:
        Generated.of(task).dataset()

    def rehearse(self, task: Task) -> None:
        """Make the task again.

        Raises:
            RewardError: another task was made.
        """
        _entry(Generated.of(task), task.extra_info.get("question"))

    def score(self, attempt: Attempted) -> RewardResult:
        """Score the answer.

        Raises:
            RewardError: the installed package makes another task of the row.
        """
        origin = Generated.of(attempt.task)
        entry = _entry(origin, attempt.task.extra_info.get("question"))
        tagged = tagged_answer(attempt.answer) if attempt.handed_in is None else attempt.handed_in
        answer = tagged
        if answer is None and not self._options.needs_tags:
            answer = without_thoughts(attempt.answer)[-MAX_TAIL_CHARS:].strip()
        value = _score(origin, entry, answer)
        metrics = {"accuracy": float(value >= 1.0), "format": float(tagged is not None)}
        return RewardResult(value, metrics, {"answer": answer or ""})

    def failed(self, attempt: Attempted) -> RewardResult:
        return RewardResult(0.0, {"accuracy": 0.0, "format": 1.0})


@lru_cache(maxsize=64)
def _entry(origin: Generated, question: str | None) -> dict[str, Any]:
    entry = origin.entry()
    if question is not None and entry["question"] != question:
        raise RewardError(
            f"generator {origin.generator!r}: the installed reasoning-gym makes another question of item "
            f"{origin.index} of seed {origin.seed} than the row has; write the rows again with this version"
        )
    return entry


def _score(origin: Generated, entry: dict[str, Any], answer: str | None) -> float:
    form = ANSWER_FORMS.get(origin.generator, "plain")
    if answer is not None and form != "plain":
        answer = answer.strip() if is_harmless(answer.strip(), form) else None
    try:
        # A copy: the same entry scores all attempts of a group.
        value = float(origin.dataset().score_answer(answer, copy.deepcopy(entry)))
    except Exception:  # noqa: BLE001 - boundary: scorers may raise anything on model output
        return 0.0
    return value if math.isfinite(value) else 0.0
