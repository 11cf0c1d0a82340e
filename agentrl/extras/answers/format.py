"""Reward for the form of an answer: a named form, or the user's regular expression."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

from pydantic import model_validator

from agentrl.extras.answers.boxed import MAX_MARKED_CHARS, last_boxed
from agentrl.extras.answers.cpu_limit import TooCostlyError, cpu_limit
from agentrl.extras.answers.gsm8k import extract_answer
from agentrl.plugins import Attempted, Reward, RewardResult
from agentrl.plugins.options import Options, read_options
from agentrl.types import JsonObject

MAX_CPU_S = 0.8
"""CPU seconds to match a pattern with one text.

A match that takes longer backtracks, and counts as no match.
"""
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def is_think(text: str) -> bool:
    """Return whether `text` is one thought in `<think>` tags, followed by an answer."""
    head, closing, answer = text.strip().partition("</think>")
    return (
        bool(closing)
        and head.startswith("<think>")
        and bool(answer.strip())
        and text.count("<think>") == text.count("</think>") == 1
    )


def is_think_answer(text: str) -> bool:
    """Return whether `text` is one `<think>` thought, then one `<answer>` answer, and nothing else."""
    text = text.strip()
    if (
        any(text.count(tag) != 1 for tag in TAGS)
        or not text.startswith("<think>")
        or not text.endswith("</answer>")
    ):
        return False
    _, _, behind = text.partition("</think>")
    between, _, answer = behind.partition("<answer>")
    return not between.strip() and bool(answer.removesuffix("</answer>").strip())


# Plain string searches: they run in the event loop, which a backtracking regular expression would block.
FORMS: Mapping[str, Callable[[str], bool]] = {
    "think": is_think,
    "think_answer": is_think_answer,
    "boxed": lambda text: last_boxed(text[-MAX_MARKED_CHARS:]) is not None,
    "answer_line": lambda text: extract_answer(text, strict=True) is not None,
}


class FormatOptions(Options):
    """Exactly one of `form` and `pattern`. `pattern` must match the whole text, and `.` matches newlines.

    `of`: check the last assistant message, or all of them.
    """

    form: Literal["think", "think_answer", "boxed", "answer_line"] | None = None
    pattern: str | None = None
    of: Literal["answer", "every_turn"] = "answer"

    @model_validator(mode="after")
    def _has_one_form(self) -> FormatOptions:
        if (self.form is None) == (self.pattern is None):
            raise ValueError(
                f"give either `form` (one of {', '.join(FORMS)}) or `pattern`, a regular expression"
            )
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r} is not a regular expression: {error}") from error
        return self


class Format(Reward):
    """1 if the text has the form, else 0.

    Thoughts are in `<think>` tags here, whatever the chat template uses.
    """

    name: ClassVar[str] = "format"

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._options = read_options(FormatOptions, self.config, plugin=f"reward {self.name!r}")
        # A backtracking pattern may run forever and holds the GIL: only a process can be killed then.
        self.runs_in = "inline" if self._options.form else "process"
        self.max_answer_cpu_s = None if self._options.form else 2

    def score(self, attempt: Attempted) -> RewardResult:
        texts = attempt.assistant_texts
        if self._options.of == "answer":
            texts = texts[-1:]
        return RewardResult(float(bool(texts) and all(map(self._has_form, texts))))

    def failed(self, attempt: Attempted) -> RewardResult:
        """Return 0. The text makes the pattern backtrack, so it was not matched."""
        return RewardResult(0.0)

    def _has_form(self, text: str) -> bool:
        if self._options.form is not None:
            return FORMS[self._options.form](text)
        assert self._options.pattern is not None
        try:
            with cpu_limit(MAX_CPU_S):
                return re.fullmatch(self._options.pattern, text, re.DOTALL) is not None
        except TooCostlyError:
            return False
