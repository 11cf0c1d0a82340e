"""AIME's answers: an integer from 0 to 999, often written with leading zeros."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from agentrl.errors import DataError
from agentrl.plugins import Attempted, Reward, RewardResult
from agentrl.plugins.options import read_options
from agentrl.plugins.rewards import RunsIn
from agentrl.rewards.boxed import BoxOptions, last_boxed
from agentrl.types import JsonObject, Task

MAX_TAIL_CHARS = 2000
"""Where an answer may stand: in so many characters at the end. It bounds the time, for the reward runs in the event loop."""
MAX_ANSWER_CHARS = 100

_DECORATION = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\{([^{}]*)\}|\\[,;:! ]|[$\s{}]|\.(?=\D*$)")
# Digits that are no part of a longer number, a decimal, a fraction or a variable's index.
_INTEGER = re.compile(r"(?<![\w.,/^-])0*([0-9]{1,3})(?![\w/]|[.,][0-9])")
_ANSWER_LINE = re.compile(r"(?i)\banswer\s*(?:is\s*)?[:=]?\s*([^\n]{0,100})")


def extract_integer(text: str, *, strict: bool) -> int | None:
    r"""Return the answer in the last \boxed{...}; without it and unless `strict`, after the last "answer", else the last integer.

    None when what is found there is no integer from 0 to 999.
    """
    tail = text[-MAX_TAIL_CHARS:]
    boxed = last_boxed(tail)
    if boxed is not None:
        return parse_integer(boxed)
    if strict:
        return None
    lines = _ANSWER_LINE.findall(tail)
    found = (_INTEGER.findall(lines[-1])[:1] if lines else []) or _INTEGER.findall(tail)[-1:]
    return int(found[0]) if found else None


def parse_integer(value: Any) -> int | None:
    """Return a ground truth or the inside of a box ("042", 42, "$42$") as an integer from 0 to 999, or None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return int(value) if value == int(value) and 0 <= value <= 999 else None
    if not isinstance(value, str):
        return None
    if len(value) > MAX_ANSWER_CHARS:
        return None
    bare = _DECORATION.sub(lambda found: found[1] or "", value)
    return int(bare) if re.fullmatch(r"0*[0-9]{1,3}", bare) else None


class Aime(Reward):
    """1 for the right integer in the last assistant message. Metrics: accuracy, format (there is a box)."""

    name: ClassVar[str] = "aime"
    runs_in: RunsIn = "inline"

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._options = read_options(BoxOptions, self.config, plugin=f"reward {self.name!r}")

    def check(self, task: Task) -> None:
        if parse_integer(task.ground_truth) is None:
            raise DataError(
                f"task {task.task_id}: reward {self.name!r} needs an integer from 0 to 999 as reward_model.ground_truth "
                f"(got {str(task.ground_truth)[:80]!r})"
            )

    def score(self, attempt: Attempted) -> RewardResult:
        options, text = self._options, attempt.answer
        answer = extract_integer(text, strict=options.strict and attempt.handed_in is None)
        accuracy = float(answer is not None and answer == parse_integer(attempt.task.ground_truth))
        has_format = last_boxed(text[-MAX_TAIL_CHARS:]) is not None
        wrong = options.score_wrong(has_box=has_format)
        metrics = {"accuracy": accuracy, "format": float(has_format)}
        return RewardResult(1.0 if accuracy else wrong, metrics, {"answer": answer})
