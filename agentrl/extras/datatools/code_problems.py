"""Programming problems, with their test cases in the format that the reward `code` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.data.row_values import plain
from agentrl.extras.datatools.originals import Original
from agentrl.extras.datatools.problems import Problem, first, make_problem, wrong


def read_code(original: Original) -> Problem:
    """Read a programming problem with its test cases; the ground truth is JSON for the reward `code`.

    Test cases are `input_output`, `ground_truth`, `test_cases` or `tests` ({inputs, outputs, fn_name} or
    {assert_case}, or JSON of it), `test` with `entry_point` (HumanEval), or `test_list` (MBPP).

    Raises:
        DataError: the problem or its test cases are missing or malformed.
    """
    raw = original.raw
    question = first(raw, "prompt", "question", "problem", "text", "description")
    if not isinstance(question, str):
        raise wrong(
            original, "needs the task as text: `prompt`, `question`, `problem`, `text` or `description`"
        )
    cases = _cases(original)
    name = first(raw, "task_id", "problem_id", "id")
    difficulty = first(raw, "difficulty", "level")
    solution = first(raw, "solution", "canonical_solution", "code")
    return make_problem(
        original, question, json.dumps(cases), solution=solution, difficulty=difficulty, id=name
    )


def _cases(original: Original) -> Mapping[str, Any]:
    """Return the cases in the format of the reward `code`: {inputs, outputs, fn_name} or {assert_case}."""
    raw = original.raw
    if isinstance(raw.get("test_list"), list):
        setup = "\n".join(raw.get("test_imports") or [])
        setup = "\n".join(filter(None, (setup, raw.get("test_setup_code"))))
        return {
            "assert_case": _some(
                original, "test_list", [f"{setup}\n{case}" if setup else case for case in raw["test_list"]]
            )
        }
    if isinstance(raw.get("test"), str):
        entry = raw.get("entry_point")
        return {"assert_case": [f"{raw['test']}\n\ncheck({entry})" if entry else raw["test"]]}
    name = next(
        (name for name in ("input_output", "ground_truth", "test_cases", "tests") if raw.get(name)), None
    )
    if name is None:
        problem = (
            "needs test cases: `input_output`, `ground_truth`, `test_cases`, `tests`, `test` or `test_list`"
        )
        raise wrong(original, f"{problem}; the row has {', '.join(raw)}")
    return _case_object(original, name)


def _case_object(original: Original, name: str) -> Mapping[str, Any]:
    value = original.raw[name]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise original.place.error(name, f"is not valid JSON: {error}") from error
    else:
        value = plain(value, original.place, name)
    if isinstance(value, list):
        if all(isinstance(case, Mapping) and {"input", "output"} <= case.keys() for case in value):
            value = {
                "inputs": [case["input"] for case in value],
                "outputs": [case["output"] for case in value],
            }
        else:
            value = {"assert_case": value}
    if not isinstance(value, Mapping):
        raise original.place.error(
            name, f"must be {{inputs, outputs}}, {{assert_case}} or a list of cases, is {str(value)[:80]!r}"
        )
    if value.get("assert_case"):
        return {"assert_case": _some(original, name, value["assert_case"])}
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if (
        not isinstance(inputs, list)
        or not isinstance(outputs, list)
        or len(inputs) != len(outputs)
        or not inputs
    ):
        raise original.place.error(name, "must have as many `inputs` as `outputs`, at least one of each")
    return {
        "inputs": inputs,
        "outputs": outputs,
        **({"fn_name": value["fn_name"]} if value.get("fn_name") else {}),
    }


def _some(original: Original, name: str, cases: Any) -> Sequence[str]:
    if (
        not isinstance(cases, list)
        or not cases
        or not all(isinstance(case, str) and case.strip() for case in cases)
    ):
        raise original.place.error(name, f"must be a list of Python code strings, is {str(cases)[:80]!r}")
    return cases
