"""The GSM8K score, as verl's example tools call it."""

from __future__ import annotations

import re

NUMBER = re.compile(r"-?[0-9.,]+")
MAX_CHARS = 300
"""Only this many characters at the end of the text are searched."""


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """Return the last number, None if there is none: after `#### ` (strict), or anywhere (flexible)."""
    if method not in ("strict", "flexible"):
        raise ValueError(f"method={method!r}; strict or flexible")
    text = solution_str[-MAX_CHARS:]
    if method == "strict":
        marked = re.findall(rf"#### ({NUMBER.pattern})", text)
        return marked[-1].replace(",", "") if marked else None
    numbers = [number for number in NUMBER.findall(text) if number not in (".", ",")]
    return numbers[-1] if numbers else None


def compute_score(
    solution_str: str,
    ground_truth: str,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return `score` for the right number, `format_score` for another one, 0 for none."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == ground_truth else format_score
