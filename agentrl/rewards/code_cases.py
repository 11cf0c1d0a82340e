"""Test cases of a program: how a ground truth states them, and when an output is the expected one."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-6, 1e-9
MAX_NUMBER_CHARS = 64

_FENCE = re.compile(r"^[ \t]*(?P<fence>`{3,}|~{3,})[^\n]*\n(?P<code>.*?)(?:^[ \t]*(?P=fence)[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Cases:
    """What a ground truth asks for: inputs and outputs, of a function or of stdin and stdout; or statements that must hold.

    function: name of the function, None for stdin and stdout. inputs: argument lists, or texts for stdin.
    asserts: pieces of Python that raise when the program is wrong; then inputs and outputs are empty.
    """

    function: str | None = None
    inputs: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()
    asserts: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.inputs) or len(self.asserts)


def extract_code(text: str) -> str | None:
    """Return the last fenced code block of a text (an unfinished one runs to the end), None when there is none."""
    blocks = list(_FENCE.finditer(text))
    return blocks[-1]["code"] if blocks else None


def read_cases(ground_truth: Any) -> Cases:
    """Read the cases of a ground truth, a mapping or its JSON.

    `{"inputs": [...], "outputs": [...]}`: texts for stdin and of stdout; with `fn_name`, argument lists and return values.
    `{"assert_case": [...]}` or `{"test": "..."}`: Python that raises when the program is wrong.

    Raises:
        ValueError: it is neither, or there is no case in it.
    """
    if isinstance(ground_truth, str):
        try:
            ground_truth = json.loads(ground_truth)
        except json.JSONDecodeError as error:
            raise ValueError(f"it is no JSON ({error}): {ground_truth[:80]!r}") from error
    if not isinstance(ground_truth, Mapping):
        raise ValueError(f"it must be a mapping with `inputs` and `outputs`, `assert_case` or `test` (got {str(ground_truth)[:80]!r})")
    asserts = ground_truth.get("assert_case") or ground_truth.get("test") or ()
    asserts = [asserts] if isinstance(asserts, str) else list(asserts)
    if not all(isinstance(text, str) for text in asserts):
        raise ValueError("`assert_case` must be a list of Python texts")
    if asserts:
        entry = ground_truth.get("entry_point")  # then the text defines check(candidate)
        return Cases(asserts=tuple(f"{text}\n\ncheck({entry})" if entry else text for text in asserts))
    return _read_pairs(ground_truth)


def _read_pairs(ground_truth: Mapping[str, Any]) -> Cases:
    inputs, outputs, function = (ground_truth.get(key) for key in ("inputs", "outputs", "fn_name"))
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or isinstance(inputs, str) or isinstance(outputs, str):
        raise ValueError("it must have `inputs` and `outputs` (lists), `assert_case` or `test`")
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"it has {len(inputs)} inputs and {len(outputs)} outputs; give at least one of each, and as many")
    if function:
        if not all(isinstance(arguments, Sequence) and not isinstance(arguments, str) for arguments in inputs):
            raise ValueError("with `fn_name`, each of `inputs` must be a list of arguments")
        return Cases(str(function), tuple(inputs), tuple(outputs))
    return Cases(None, tuple(map(_as_text, inputs)), tuple(map(_as_text, outputs)))


def _as_text(value: Any) -> str:
    """Return one stdin or stdout: a text, or a list of its lines."""
    return value if isinstance(value, str) else "\n".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def equal_texts(printed: str, expected: str) -> bool:
    """Tell whether two outputs agree: words of each line, numbers within a small tolerance; blank lines at the end do not count."""
    ours, theirs = ([line.split() for line in text.rstrip().split("\n")] for text in (printed, expected))
    if len(ours) != len(theirs):
        return False
    return all(len(a) == len(b) and all(map(_equal_words, a, b)) for a, b in zip(ours, theirs, strict=True))


def equal_values(returned: Any, expected: Any) -> bool:
    """Tell whether two JSON values agree: numbers within a small tolerance, true and 1 differ."""
    if isinstance(returned, bool) or isinstance(expected, bool):
        return returned is expected
    if isinstance(returned, (int, float)) and isinstance(expected, (int, float)):
        return _close(returned, expected)
    if isinstance(returned, list) and isinstance(expected, (list, tuple)):
        return len(returned) == len(expected) and all(map(equal_values, returned, expected))
    if isinstance(returned, dict) and isinstance(expected, Mapping):
        return returned.keys() == expected.keys() and all(equal_values(returned[key], expected[key]) for key in returned)
    return bool(returned == expected)


def _equal_words(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    if max(len(ours), len(theirs)) > MAX_NUMBER_CHARS:
        return False
    try:
        exact = int(ours), int(theirs)
    except ValueError:
        try:
            return _close(float(ours), float(theirs))
        except ValueError:
            return False
    return exact[0] == exact[1]  # integers are exact, however large


def _close(ours: float, theirs: float) -> bool:
    if isinstance(ours, int) and isinstance(theirs, int):
        return ours == theirs
    try:
        return math.isclose(ours, theirs, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
    except OverflowError:  # an integer beyond the range of a float
        return False


def is_expected(reply: str, expected: Any) -> bool:
    """Tell whether a reply of the harness, `{"value": ...}` as JSON, is the expected value."""
    try:
        returned = json.loads(reply)
    except ValueError:  # cut in the middle
        return False
    if not isinstance(returned, dict) or "value" not in returned:
        return False
    # Datasets of programming contests write the one return value bare, or in a list of its own.
    is_wrapped = isinstance(expected, (list, tuple)) and len(expected) == 1
    return equal_values(returned["value"], expected) or (is_wrapped and equal_values(returned["value"], expected[0]))
