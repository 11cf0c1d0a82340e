"""Test cases of programs: how a ground truth states them, and when an output equals the expected one."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

RELATIVE_TOLERANCE = 1e-9
"""Default for numbers that are not integers."""
MAX_NUMBER_CHARS = 64

_FENCE = re.compile(
    r"^[ \t]*(?P<fence>`{3,}+|~{3,}+)[ \t{.]*+(?P<language>[\w+#-]*+)[^\n]*+\n"
    r"(?P<code>.*?)(?:^[ \t]*(?P=fence)[ \t]*$|\Z)",
    re.DOTALL | re.MULTILINE,
)
"""Possessive quantifiers: a line of a thousand backticks must not cause backtracking over every split."""
PYTHON = frozenset({"python", "python3", "py", "py3"})
"""Languages of a fenced block that are run."""
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,6})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Cases:
    """The cases of a ground truth: inputs and outputs of a function or of stdin and stdout, or statements to
    execute.

    function: name of the function, None for stdin and stdout. inputs: argument lists, or texts for stdin.
    asserts: pieces of Python that raise if the program is wrong; then inputs and outputs are empty.
    tolerance: relative and absolute, for expected numbers with a point or an exponent; None: the default.
    """

    function: str | None = None
    inputs: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()
    asserts: tuple[str, ...] = ()
    tolerance: float | None = None

    def __len__(self) -> int:
        return len(self.inputs) or len(self.asserts)


def extract_code(text: str) -> str | None:
    """Return the last fenced block of Python of a text, else its last block without a language, else its last
    block; None if there is none.

    An unclosed block extends to the end.
    """
    blocks = list(_FENCE.finditer(text))
    for languages in (PYTHON, {""}):
        if own := [block["code"] for block in blocks if block["language"].lower() in languages]:
            return str(own[-1])
    return blocks[-1]["code"] if blocks else None


def read_cases(ground_truth: Any) -> Cases:
    """Parse the cases of a ground truth, a mapping or its JSON.

    `{"inputs": [...], "outputs": [...]}`: texts of stdin and stdout. With `fn_name`, they are argument lists
    and return values, or the JSON of both, one argument per line. `tolerance` belongs to this form.
    `{"assert_case": [...]}` or `{"test": "..."}`: Python that raises if the program is wrong.

    Raises:
        ValueError: it has another form, or no case.
    """
    if isinstance(ground_truth, str):
        try:
            ground_truth = json.loads(ground_truth)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is not valid JSON ({error}): {ground_truth[:80]!r}") from error
    if not isinstance(ground_truth, Mapping):
        raise ValueError(
            "it must be a mapping with `inputs` and `outputs`, `assert_case` or `test` (got "
            f"{str(ground_truth)[:80]!r})"
        )
    asserts = ground_truth.get("assert_case") or ground_truth.get("test") or ()
    asserts = [asserts] if isinstance(asserts, str) else list(asserts)
    if not all(isinstance(text, str) for text in asserts):
        raise ValueError("`assert_case` must be a list of Python code strings")
    if asserts:
        entry = ground_truth.get("entry_point")  # then the text defines check(candidate)
        return Cases(asserts=tuple(f"{text}\n\ncheck({entry})" if entry else text for text in asserts))
    return _read_pairs(ground_truth)


def _read_pairs(ground_truth: Mapping[str, Any]) -> Cases:
    inputs, outputs, function, tolerance = (
        ground_truth.get(key) for key in ("inputs", "outputs", "fn_name", "tolerance")
    )
    if (
        not isinstance(inputs, Sequence)
        or not isinstance(outputs, Sequence)
        or isinstance(inputs, str)
        or isinstance(outputs, str)
    ):
        raise ValueError("it must have `inputs` and `outputs` (lists), `assert_case` or `test`")
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(
            f"it has {len(inputs)} inputs and {len(outputs)} outputs; give at least one of each, in equal "
            "number"
        )
    if tolerance is not None and (
        isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 <= tolerance < 1
    ):
        raise ValueError(f"`tolerance` must be a number from 0 up to 1 (got {tolerance!r})")
    if function:
        pairs = [_read_call(given, wanted) for given, wanted in zip(inputs, outputs, strict=True)]
        return Cases(
            str(function),
            tuple(args for args, _ in pairs),
            tuple(wanted for _, wanted in pairs),
            tolerance=tolerance,
        )
    return Cases(None, tuple(map(_as_text, inputs)), tuple(map(_as_text, outputs)), tolerance=tolerance)


def _read_call(given: Any, wanted: Any) -> tuple[Any, Any]:
    """Return arguments and return value. Texts are parsed as JSON, line by line."""
    if isinstance(given, str):
        try:
            given = [json.loads(line) for line in given.split("\n") if line.strip()]
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"with `fn_name`, a text among `inputs` must have JSON on each line ({error}): {given[:80]!r}"
            ) from error
        if isinstance(wanted, str):
            with contextlib.suppress(ValueError, RecursionError):  # not JSON: the text itself is expected
                wanted = json.loads(wanted)
    if not isinstance(given, Sequence):
        raise ValueError("with `fn_name`, each of `inputs` must be a list of arguments")
    return given, wanted


def _as_text(value: Any) -> str:
    """Return the text of a stdin or stdout, which may be given as a list of lines."""
    return (
        value
        if isinstance(value, str)
        else "\n".join(map(str, value))
        if isinstance(value, (list, tuple))
        else str(value)
    )


def equal_texts(printed: str, expected: str, tolerance: float | None = None) -> bool:
    """Return whether outputs agree, line by line and word by word; numbers are compared by value."""
    ours, theirs = ([line.split() for line in text.strip().split("\n")] for text in (printed, expected))
    if len(ours) != len(theirs):
        return False
    return all(
        len(a) == len(b) and all(_equal_words(x, y, tolerance) for x, y in zip(a, b, strict=True))
        for a, b in zip(ours, theirs, strict=True)
    )


def is_expected(returned: Any, expected: Any, tolerance: float | None = None) -> bool:
    """Return whether a function returned the expected value."""
    # Some contest datasets wrap the single return value in a list.
    is_wrapped = isinstance(expected, (list, tuple)) and len(expected) == 1
    return equal_values(returned, expected, tolerance) or (
        is_wrapped and equal_values(returned, expected[0], tolerance)
    )


def equal_values(returned: Any, expected: Any, tolerance: float | None = None) -> bool:
    """Return whether a value equals a JSON value. true and 1 differ, tuples are lists, keys of mappings are
    texts.

    Integers must be equal. Other numbers may differ by the tolerance.
    """
    if isinstance(returned, bool) or isinstance(expected, bool):
        return returned is expected
    if isinstance(expected, (int, float)):
        return isinstance(returned, (int, float)) and _equal_numbers(returned, expected, tolerance)
    if isinstance(expected, (list, tuple)):
        is_list = isinstance(returned, (list, tuple)) and len(returned) == len(expected)
        return is_list and all(equal_values(x, y, tolerance) for x, y in zip(returned, expected, strict=True))
    if isinstance(expected, Mapping):
        if not isinstance(returned, dict):
            return False
        ours, theirs = (
            {_key(key): value for key, value in mapping.items()} for mapping in (returned, expected)
        )
        is_alike = len(ours) == len(returned) and ours.keys() == theirs.keys()
        return is_alike and all(equal_values(ours[key], theirs[key], tolerance) for key in theirs)
    return type(returned) is type(expected) and bool(returned == expected)


def _key(key: Any) -> Any:
    """Return a mapping's key as JSON writes it. Keys that JSON cannot write stay different from all texts."""
    return json.dumps(key) if key is None or isinstance(key, (bool, int, float)) else key


def _equal_numbers(ours: float, theirs: float, tolerance: float | None) -> bool:
    if ours == theirs or isinstance(theirs, int):
        return ours == theirs
    if math.isnan(theirs) or math.isinf(theirs):
        return math.isnan(theirs) and ours != ours
    if tolerance is None and theirs.is_integer():
        return False
    try:
        return _is_close(float(ours), theirs, tolerance)
    except OverflowError:  # an integer beyond the range of a float
        return False


def _equal_words(ours: str, theirs: str, tolerance: float | None) -> bool:
    if ours == theirs:
        return True
    if (
        max(len(ours), len(theirs)) > MAX_NUMBER_CHARS
        or not _NUMBER.fullmatch(ours)
        or not _NUMBER.fullmatch(theirs)
    ):
        return False
    if Decimal(ours) == Decimal(theirs):
        return True
    if not {".", "e", "E"} & set(theirs):
        return False  # integers are exact, however large
    if tolerance is None and Decimal(theirs) == Decimal(theirs).to_integral_value():
        return False
    return _is_close(float(ours), float(theirs), tolerance)


def _is_close(ours: float, theirs: float, tolerance: float | None) -> bool:
    if math.isinf(theirs):  # beyond the range of a float
        return False
    if tolerance is None:
        return math.isclose(ours, theirs, rel_tol=RELATIVE_TOLERANCE)
    return math.isclose(ours, theirs, rel_tol=tolerance, abs_tol=tolerance)
