"""Everything a report needs from an evaluation's attempts, collected in one pass.

That is: the records of the attempts, two accuracies per answer (strict and flexible), examples, and
questions.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from agentrl.evaluation.contamination import Question
from agentrl.figures.attempts import EvaluatedAttempt, attempt_of
from agentrl.figures.summary import Estimate, is_right, share
from agentrl.tracking.redact import redact
from agentrl.types import Message, Trajectory

MAX_FAILURE_CHARS = 120
"""Failures are counted by the beginning of their text; the rest differs between attempts."""
_STRICT, _FLEXIBLE = "accuracy_strict", "accuracy_flexible"


class ExampleKind(enum.StrEnum):
    """What an example shows."""

    SOLVED = "solved"
    WRONG = "wrong"
    TRUNCATED = "truncated"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Example:
    """One attempt for a person to read."""

    kind: ExampleKind
    attempt: EvaluatedAttempt
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class TwoReadings:
    """Accuracy of one source, strict (only answers in the requested form) and flexible (any form)."""

    strict: Estimate
    flexible: Estimate


class Evidence:
    """Collects trajectories one by one. Keeps their records, but the texts of examples and questions only."""

    def __init__(self) -> None:
        self.attempts: list[EvaluatedAttempt] = []
        self.failures: Counter[str] = Counter()
        self._examples: dict[tuple[str, ExampleKind], Example] = {}
        self._questions: dict[tuple[str, str], Question] = {}
        self._readings: defaultdict[str, defaultdict[str, list[tuple[float, float]]]] = defaultdict(
            lambda: defaultdict(list)
        )

    def add(self, trajectory: Trajectory) -> None:
        """Add one attempt."""
        attempt = attempt_of(trajectory)
        # An error message may quote a URL, which may contain a user and password.
        attempt = dataclasses.replace(attempt, failure=redact({"failure": attempt.failure})["failure"])
        self.attempts.append(attempt)
        if attempt.failure is not None:
            self.failures[" ".join(attempt.failure.split())[:MAX_FAILURE_CHARS]] += 1
        kind = _kind(attempt)
        self._examples.setdefault((attempt.source, kind), Example(kind, attempt, trajectory.messages))
        key = (attempt.source, attempt.problem)
        if key not in self._questions:
            self._questions[key] = Question(attempt.source, attempt.problem, _prompt(trajectory.messages))
        self._read(attempt, trajectory.metrics)

    @property
    def examples(self) -> list[Example]:
        """The first attempt of each kind of each source."""
        return sorted(
            self._examples.values(),
            key=lambda example: (example.attempt.source, list(ExampleKind).index(example.kind)),
        )

    @property
    def questions(self) -> list[Question]:
        """The question of each problem."""
        return list(self._questions.values())

    @property
    def readings(self) -> dict[str, TwoReadings]:
        """Both accuracies of each source whose reward reports both."""
        found = {}
        for source, problems in sorted(self._readings.items()):
            means = np.array([np.mean(pairs, axis=0) for pairs in problems.values()])
            strict, flexible = share(means[:, 0]), share(means[:, 1])
            assert strict is not None, "a source is noted with its first problem"
            assert flexible is not None
            found[source] = TwoReadings(strict, flexible)
        return found

    def _read(self, attempt: EvaluatedAttempt, metrics: Mapping[str, float]) -> None:
        if attempt.failure is not None:
            return
        both = [
            next((v for name, v in metrics.items() if name.endswith(f"/{reading}")), None)
            for reading in (_STRICT, _FLEXIBLE)
        ]
        if both[0] is not None and both[1] is not None:
            self._readings[attempt.source][attempt.problem].append((both[0], both[1]))


def _kind(attempt: EvaluatedAttempt) -> ExampleKind:
    if attempt.failure is not None:
        return ExampleKind.FAILED
    if is_right(attempt):
        return ExampleKind.SOLVED
    return ExampleKind.TRUNCATED if attempt.is_truncated else ExampleKind.WRONG


def _prompt(messages: Iterable[Message]) -> str:
    """Return the user messages before the first assistant message: the question with its template."""
    before = itertools.takewhile(lambda message: message.role != "assistant", messages)
    return "\n".join(message.content for message in before if message.role == "user")
