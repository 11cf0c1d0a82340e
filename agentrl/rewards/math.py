"""Mathematical answers, compared as expressions by `math-verify`: 1/2, 0.5 and \\frac{1}{2} are the same."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from agentrl.errors import DataError, RewardError
from agentrl.plugins import Attempted, Reward, RewardResult
from agentrl.plugins.options import read_options
from agentrl.plugins.rewards import RunsIn
from agentrl.rewards.boxed import BoxOptions, last_boxed
from agentrl.types import JsonObject, Task

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time-outs are off: the deadline is ours

MAX_DETAIL_CHARS = 200


class Math(Reward):
    """1 when the last assistant message gives an expression equal to the ground truth. Metrics: accuracy, format (there is a box).

    It runs in a process: comparing expressions may take forever, and the library's own time-outs need the main thread and
    answer "wrong", where only the deadline is known to have passed.
    """

    name: ClassVar[str] = "math"
    runs_in: RunsIn = "process"

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._options = read_options(BoxOptions, self.config, plugin=f"reward {self.name!r}")

    def check(self, task: Task) -> None:
        if not _truth(task.ground_truth):
            raise DataError(
                f"task {task.task_id}: reward {self.name!r} needs an expression (text or a number) as reward_model.ground_truth "
                f"(got {str(task.ground_truth)[:80]!r})"
            )

    def score(self, attempt: Attempted) -> RewardResult:
        """Score; takes milliseconds, or for ever.

        Raises:
            RewardError: the ground truth is no expression.
        """
        options, text = self._options, attempt.answer
        boxed = last_boxed(text)
        answer = _parse(f"\\boxed{{{boxed}}}", LatexExtractionConfig()) if boxed is not None else []
        if boxed is None and not (options.strict and attempt.handed_in is None):
            answer = _parse(text, LatexExtractionConfig(), ExprExtractionConfig())
        accuracy = float(is_equal(answer, attempt.task.ground_truth))
        wrong = options.score_wrong(has_box=boxed is not None)
        metrics = {"accuracy": accuracy, "format": float(boxed is not None)}
        return RewardResult(1.0 if accuracy else wrong, metrics, {"answer": str(answer[-1])[:MAX_DETAIL_CHARS] if answer else None})


def is_equal(answer: list[Any], ground_truth: Any) -> bool:
    """Tell whether a parsed answer equals the ground truth.

    Raises:
        RewardError: the ground truth is no expression.
    """
    truth = _parse(_truth(ground_truth), LatexExtractionConfig())
    if not truth:
        raise RewardError(f"the ground truth {str(ground_truth)[:80]!r} is no mathematical expression")
    # A comparison that raises inside of the library is one of unlike things (a set and a number): not equal.
    return bool(answer) and verify(truth, answer, timeout_seconds=None)


def _parse(text: str, *kinds: Any) -> list[Any]:
    return parse(text, kinds, parsing_timeout=None)


def _truth(ground_truth: Any) -> str:
    """Return the ground truth as boxed LaTeX; of a whole solution its last box; "" when there is none."""
    if isinstance(ground_truth, bool) or not isinstance(ground_truth, (str, int, float)):
        return ""
    text = str(ground_truth).strip()
    inside = last_boxed(text)
    text = text.strip("$") if inside is None else inside
    return f"\\boxed{{{text}}}" if text else ""
