"""Programs that want the reward without the solution, in every form of test case: none gains, and none makes
the reward fail.
"""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest
import trio

from agentrl.extras.sandbox.code_reward import Code
from agentrl.plugins import Attempted
from parts.trajectories import attempted, make_task


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hostile_answers, hostile_further = load("hostile_answers"), load("hostile_further")
HOSTILE: dict[str, str] = hostile_answers.HOSTILE
FURTHER: dict[str, str] = hostile_further.FURTHER
SLOW = (*hostile_answers.SLOW, *hostile_further.SLOW)

WANTED = {3: 71284, 10: 791913, 21: 3492292}
SOLUTION = "def f(x): return x * x * 7919 + 13"
FORMS = {
    "stdin": {"inputs": list(map(str, WANTED)), "outputs": list(map(str, WANTED.values()))},
    "function": {"fn_name": "f", "inputs": [[x] for x in WANTED], "outputs": list(WANTED.values())},
    "function_of_lines": {
        "fn_name": "f",
        "inputs": list(map(str, WANTED)),
        "outputs": list(map(str, WANTED.values())),
    },
    "asserts": {"assert_case": [f"assert f({x}) == {wanted}" for x, wanted in WANTED.items()]},
    "statements": {
        "assert_case": [
            """value = f(3)
assert value == 71284""",
            "assert abs(f(10) - 791913) < 1e-6",
            """import math
assert math.isclose(f(21), 3492292)""",
            "assert math.fabs(f(3) - 71284) <= 1e-6",
            "assert 71284 == f(3) and f(3) in (71284, 71285) and not f(3) != 71284",
            "assert sorted([f(3), f(10)]) == [71284, 791913]",
            "assert all(f(x) == y for x, y in [(3, 71284), (10, 791913)])",
            "assert list(map(f, [3, 10])) == [71284, 791913]",
            "assert str(f(3)) == '71284' and int(f(3)) == 71284",
        ]
    },
    "check": {
        "test": """def check(candidate):
    assert candidate(3) == 71284
    assert abs(candidate(10) - 791913) < 1e-6
    assert candidate(21) == 3492292""",
        "entry_point": "f",
    },
    "unittest": {
        "test": """
import unittest
class TestF(unittest.TestCase):
    def test_three(self): self.assertEqual(f(3), 71284)
    def test_ten(self): self.assertAlmostEqual(f(10), 791913)
if __name__ == "__main__":
    unittest.main()
"""
    },
    "methods": {
        "assert_case": [
            "assert abs(Solution().f(3) - 71284) < 1e-6",
            """s = Solution()
assert 791912.999 < s.f(10) < 791913.001""",
            "assert Solution().f(21) == 3492292",
            """import unittest
class TestF(unittest.TestCase):
    def test_f(self):
        self.assertAlmostEqual(Solution().f(3), 71284)
        self.assertGreaterEqual(Solution().f(3), 71284)""",
        ]
    },
    "functions_of_tests": {
        "test": """from solution import f

def test_f():
    assert f(3) == 71284

def test_more():
    assert f(10) == 791913"""
    },
}
SAMPLE = {
    "stdin": ("except_hook", "exit_later"),
    "function": ("eq", "own_file", "deep_list", "deep_line", "collisions", "fraction_of_text"),
    "asserts": ("mock_any", "constants"),
    "statements": (
        "eq",
        "universal",
        "raises_stop",
        "trace",
        "verdicts_to_all",
        "forged_reference",
        "exception_as_class",
    ),
    "check": ("class_named_f", "except_hook", "patched_modules"),
    "methods": ("returns_itself", "returns_another"),
}
"""Of each way in which a program meets its test, those that try it."""
FORMS_OF_FURTHER = ("stdin", "function", "statements", "unittest", "methods")
"""The others differ in how the test is written alone."""


def attempt(source: str, form: str) -> Attempted:
    code = f"{source}\nprint(f(int(input())))" if form == "stdin" else source
    if form == "methods" and "class Solution" not in source:
        code = f"{source}\nclass Solution:\n    def f(self, x): return f(x)"
    return attempted(make_task("Write f.", FORMS[form]), f"```python\n{code}\n```")


@pytest.mark.parametrize(
    "form", [form if form in SAMPLE else pytest.param(form, marks=pytest.mark.slow) for form in FORMS]
)
def test_the_solution_earns_one(form: str) -> None:
    assert trio.run(Code({"wall_s": 60.0, "total_s": 200.0}).score, attempt(SOLUTION, form)).value == 1.0


@pytest.mark.parametrize("form", SAMPLE)
async def test_a_hostile_program_earns_nothing(form: str) -> None:
    reward = Code({"wall_s": 60.0, "total_s": 200.0, "continuous": False})
    values = {}

    async def score(name: str) -> None:
        values[name] = (await reward.score(attempt((HOSTILE | FURTHER)[name], form))).value

    async with trio.open_nursery() as nursery:
        for name in SAMPLE[form]:
            nursery.start_soon(score, name)
    assert values == dict.fromkeys(SAMPLE[form], 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_no_hostile_program_gains_or_breaks_the_reward(form: str) -> None:
    programs = HOSTILE | (FURTHER if form in FORMS_OF_FURTHER else {})
    assert len(programs) >= 60
    for name, source in programs.items():
        slow = name in SLOW
        reward = Code(
            {"cpu_s": 1.0, "wall_s": 2.0, "total_s": 2.0} if slow else {"wall_s": 60.0, "total_s": 200.0}
        )
        began = time.process_time()
        result = trio.run(reward.score, attempt(source, form))
        used_s = time.process_time() - began
        assert result.value == 0.0, name
        assert used_s < 1.0, f"{name} took {used_s:.2f} s of the grader"
