"""Lines of the closing table about opponents: how many attempts they took part in, and how many were won."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.tracking.metrics import StepRecord

MOST_STEPS = 8
"""Policies of one opponent that a line names; of more, the first ones and the last ones."""

_ATTEMPTS = re.compile(r"(rollout|val)/opponent/(.+)/trajectories")
_BEHIND = re.compile(r"opponents/(.+)/behind/(-?\d+)/trajectories")
_STEP = re.compile(r"(opponents)/([^/]+)/step")


@dataclass(slots=True)
class Won:
    """Attempts, and the sum of their accuracies."""

    attempts: float = 0.0
    sum: float = 0.0

    def add(self, values: Mapping[str, float], prefix: str) -> None:
        number = values[f"{prefix}trajectories"]
        self.attempts += number
        self.sum += number * values[f"{prefix}accuracy"]

    @property
    def share(self) -> float:
        return self.sum / self.attempts


def opponent_lines(records: Sequence[StepRecord]) -> list[str]:
    """Return a line for each opponent: attempts that were trained on and their accuracy, by the policy that
    the opponent was, and the accuracy in the first and the last validation.

    records: of all steps. Of an opponent without attempts they tell only if it follows the policy.
    """
    trained: dict[str, Won] = {}
    by_step: defaultdict[str, dict[int, Won]] = defaultdict(dict)
    validated: defaultdict[str, list[float]] = defaultdict(list)
    following: set[str] = set()
    for record in records:
        following.update(name for _, name in _found(_STEP, record))
        for kind, name in _found(_ATTEMPTS, record):
            prefix = f"{kind}/opponent/{name}/"
            if kind == "rollout":
                trained.setdefault(name, Won()).add(record.values, prefix)
            else:
                validated[name].append(record.values[f"{prefix}accuracy"])
        for name, behind in _found(_BEHIND, record):
            step = int(record.values[f"opponents/{name}/step"]) - int(behind)
            won = by_step[name].setdefault(step, Won())
            won.add(record.values, f"opponents/{name}/behind/{behind}/")
    return [
        f"opponent {name}: {_text(trained.get(name), by_step.get(name, {}), validated.get(name, []))}"
        for name in sorted({*trained, *validated, *following})
    ]


def _found(pattern: re.Pattern[str], record: StepRecord) -> Iterable[tuple[str, str]]:
    for name in record.values:
        if (found := pattern.fullmatch(name)) is not None:
            yield found[1], found[2]


def _text(trained: Won | None, by_step: Mapping[int, Won], validated: Sequence[float]) -> str:
    parts = []
    if trained is not None:
        parts.append(f"{trained.attempts:,.0f} attempts trained on, accuracy {trained.share:.3f}")
    if by_step:
        shown = [
            f"{step}: {by_step[step].attempts:,.0f}, {by_step[step].share:.3f}" for step in sorted(by_step)
        ]
        if len(shown) > MOST_STEPS:
            shown = [*shown[: MOST_STEPS // 2], "...", *shown[-(MOST_STEPS // 2) :]]
        parts.append(f"by the step of its policy {'; '.join(shown)}")
    if validated:
        first, *others = (f"{accuracy:.3f}" for accuracy in validated)
        parts.append(f"in validation {first}" + (f" -> {others[-1]}" if others else ""))
    return "; ".join(parts) or "it took part in no attempt; do rows name it?"
