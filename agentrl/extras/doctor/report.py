"""The report of an examination: lines for people, JSON for machines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import agentrl
from agentrl.extras.doctor.diagnosis import VERDICTS, Diagnosis
from agentrl.terminal_text import visible

_VERDICT_CHARS = max(map(len, VERDICTS))
_PART_CHARS = 18


def is_well(diagnoses: Sequence[Diagnosis]) -> bool:
    """Return whether nothing is wrong. What is slow works."""
    return all(own.verdict != "wrong" for own in diagnoses)


def lines_of(diagnosis: Diagnosis) -> list[str]:
    """Return one line, and another one with the cure if there is one."""
    name = f"{diagnosis.part} on {diagnosis.node}" if diagnosis.node else diagnosis.part
    head = f"{diagnosis.verdict.ljust(_VERDICT_CHARS)}  {name.ljust(_PART_CHARS)}"
    lines = [f"{head}  {visible(_on_one_line(diagnosis.text))}"]
    if diagnosis.cure:
        lines.append(f"{' ' * len(head)}  cure: {visible(_on_one_line(diagnosis.cure))}")
    return lines


def summary(diagnoses: Sequence[Diagnosis], *, seconds: float) -> str:
    """Return the last line."""
    counts = Counter(own.verdict for own in diagnoses)
    shown = ", ".join(f"{counts[verdict]} {verdict}" for verdict in reversed(VERDICTS))
    return f"{shown}; {seconds:.0f} s"


def as_json(diagnoses: Sequence[Diagnosis], *, seconds: float) -> str:
    """Return the whole report as JSON."""
    report = {
        "agentrl": agentrl.__version__,
        "is_well": is_well(diagnoses),
        "seconds": round(seconds, 1),
        "diagnoses": [asdict(own) for own in diagnoses],
    }
    return json.dumps(report, indent=2)


def _on_one_line(text: str) -> str:
    return " ".join(text.split())
