"""Tests that run apart from the code that they test: no code passes them without being right."""

from __future__ import annotations

import pytest

from agentrl.extras.sandbox.apart import read_apart
from agentrl.testing import Call, play
from agentrl.types import JsonObject, Outcome, Trajectory

HIDDEN = """import json
import unittest

from cart import *
from shop.prices import Book, price as priced


class TestTotal(unittest.TestCase):
    def setUp(self):
        self.items = [1, 2]

    def test_sum(self):
        self.assertEqual(total(self.items), 3)
        self.assertTrue(total([0.5, 0.25]) == 0.75)

    def test_empty(self):
        self.assertEqual(total([]), 0)

    def test_refused(self):
        with self.assertRaises(ValueError):
            total(None)

    def test_book(self):
        self.assertEqual(Book(priced("tea")).pages(), 7)


def test_text():
    assert json.dumps(total([4])) == "4"
"""
CODE = """def total(items):
    if items is None:
        raise ValueError("no items")
    return len(items)
"""
PRICES = """class Book:
    def __init__(self, price):
        self.price = price

    def pages(self):
        return self.price


def price(name):
    return 7 if name == "tea" else 0
"""
ROW: JsonObject = {
    "files": {"cart.py": CODE, "shop/__init__.py": "", "shop/prices.py": PRICES},
    "tests": {"tests/test_cart.py": HIDDEN},
    "fail_to_pass": ["tests.test_cart.TestTotal.test_sum", "tests/test_cart.py::test_text"],
    "pass_to_pass": [f"tests.test_cart.TestTotal.test_{name}" for name in ("empty", "refused", "book")],
}
RIGHT = Call("edit", {"path": "cart.py", "old": "len(items)", "new": "sum(items)"})


def attempt(*calls: Call, row: JsonObject = ROW) -> Trajectory:
    trajectory = play(
        [*calls, "done"],
        environment="repository",
        environment_kwargs=dict(row),
        environment_config={"repository": {"max_boxes": 1}},
        reward="tests_pass",
        max_turns=len(calls) + 1,
    )
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.failure
    return trajectory


def write(text: str, path: str = "cart.py") -> Call:
    return Call("bash", {"command": f"cat > {path} <<'END'\n{text}\nEND\n"})


def test_the_right_change_passes_all_tests_and_no_change_some() -> None:
    right, wrong = attempt(RIGHT), attempt()
    (reward,) = right.rewards
    assert reward.value == 1.0
    (reward,) = wrong.rewards
    assert reward.value == 0.0
    assert wrong.metrics["reward/tests_pass/fail_to_pass"] == 0.0
    assert wrong.metrics["reward/tests_pass/pass_to_pass"] == 1.0


ATTACKS = {
    "replace assertions": "import unittest\nunittest.TestCase.assertEqual = lambda *a, **k: None\n"
    "unittest.TestCase.run = lambda self, result: result.addSuccess(self)\n" + CODE,
    "find verdicts": "import gc, unittest\nfor one in gc.get_objects():\n"
    "    if isinstance(one, unittest.TestResult):\n        one.failures = one.errors = []\n" + CODE,
    "equal everything": "class Any(int):\n    def __eq__(self, other):\n        return True\n"
    "    __hash__ = int.__hash__\n\n\ndef total(items):\n    return Any(9)\n",
    "walk the frames": "import sys\n\n\ndef total(items):\n    frame = sys._getframe()\n    while frame:\n"
    "        for name, value in list(frame.f_locals.items()) + list(frame.f_globals.items()):\n"
    "            if isinstance(value, dict) and 'passed' in value:\n                value['passed'] = True\n"
    "            if hasattr(value, 'passed'):\n                value.passed = {}\n"
    "        frame = frame.f_back\n"
    "    return len(items)\n",
    "write to all descriptors": "import os\nfor number in range(3, 64):\n    for text in (b'passed\\n' * 9, "
    "b'{\"value\": true}\\n' * 9):\n        try:\n            os.write(number, text)\n"
    "        except OSError:\n            pass\n" + CODE,
    "leave early": "import os\nos._exit(0)\n",
    "print verdicts": "print('compiles\\nloaded\\npassed\\npassed\\npassed')\n" + CODE,
    "take a module's place": CODE,
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "replace assertions")) for name in ATTACKS],
)
def test_code_that_attacks_its_tests_passes_none_that_it_should_not(name: str) -> None:
    calls = [write(ATTACKS[name])]
    if name == "take a module's place":
        fake = "class TestCase:\n    pass\nclass TestResult:\n    testsRun = 1\n    skipped = ()\n"
        calls = [write(fake, "unittest.py"), write("def dumps(value):\n    return '4'\n", "json.py")]
    (reward,) = attempt(*calls).rewards
    assert reward.value == 0.0


BY_MODULE = """from __future__ import annotations

import cart
import shop.prices as prices
from shop import prices as others
from shop.prices import Book as Paper
import unittest


class TestTotal(unittest.TestCase):
    def test_sum(self):
        self.assertEqual(cart.total([1, 2]), 3)
        with self.assertRaises(cart.Refused):
            cart.total(None)

    def test_book(self):
        self.assertEqual(Paper(prices.price("tea")).pages(), 7)
        self.assertTrue(callable(others.price("tea").bit_length))
"""


def test_names_of_modules_are_used_apart() -> None:
    code = "class Refused(Exception): pass\n" + CODE.replace("ValueError", "Refused")
    row = {
        "files": {**ROW["files"], "cart.py": code},
        "tests": {"tests/test_cart.py": BY_MODULE},
        "fail_to_pass": ["tests.test_cart.TestTotal.test_sum"],
        "pass_to_pass": ["tests.test_cart.TestTotal.test_book"],
    }
    for calls, expected in (((RIGHT,), 1.0), ((), 0.0)):
        trajectory = attempt(*calls, row=row)
        assert trajectory.rewards[0].value == expected
        assert trajectory.metrics["reward/tests_pass/apart"] == 1.0
        assert trajectory.metrics["reward/tests_pass/pass_to_pass"] == 1.0


def test_tests_that_cannot_run_apart_run_beside_the_code() -> None:
    tests = {
        "tests/test_cart.py": "def test_sum(tmp_path):\n    import cart\n    assert cart.total([1, 2]) == 3\n"
    }
    row = {**ROW, "tests": tests, "runner": "pytest", "pass_to_pass": []}
    row["fail_to_pass"] = ["tests/test_cart.py::test_sum"]
    trajectory = attempt(RIGHT, row=row)
    assert trajectory.rewards[0].value == 1.0
    assert trajectory.metrics["reward/tests_pass/apart"] == 0.0


def test_the_same_attack_succeeds_where_tests_and_code_share_a_process() -> None:
    names = [*ROW["fail_to_pass"][:1], *ROW["pass_to_pass"]]
    trajectory = play(
        [write(ATTACKS["replace assertions"]), "done"],
        environment="repository",
        environment_kwargs={**ROW, "fail_to_pass": names, "pass_to_pass": []},
        environment_config={"repository": {"max_boxes": 1}},
        reward="tests_pass",
        reward_config={"reward_config": {"tests_pass": {"apart": False}}},
        max_turns=2,
    )
    (reward,) = trajectory.rewards
    assert reward.value == 1.0


def test_tests_in_the_box_itself_are_not_read() -> None:
    (reward,) = attempt(
        write("def test_text():\n    pass\n", "test_cart.py"), Call("bash", {"command": "kill -9 -1"})
    ).rewards
    assert reward.value == 0.0


@pytest.mark.parametrize(
    ("text", "name", "why"),
    [
        ("def test_a(tmp_path):\n    pass\n", "test_a.py::test_a", "needs pytest"),
        (
            "import pytest\n@pytest.mark.parametrize('x', [1])\ndef test_a(x): pass\n",
            "test_a.py::test_a",
            "needs",
        ),
        ("from . import x\ndef test_a(): assert x\n", "test_a.py::test_a", "relative imports"),
        ("async def test_a(): pass\n", "test_a.py::test_a", "is async"),
        (
            "import unittest\nclass TestA(unittest.IsolatedAsyncioTestCase):\n def test_a(self): pass\n",
            "test_a.TestA.test_a",
            "is async",
        ),
        ("def test_a(): open('cart.py')\n", "test_a.py::test_a", "uses `open`"),
        (
            "from unittest import mock\ndef test_a(): mock.patch('cart.x')\n",
            "test_a.py::test_a",
            "uses `patch`",
        ),
        ("import test_a\ndef test_a(): pass\n", "test_a.py::test_a", "another test file"),
        ("import cart\ndef test_a(): assert cart.total == 3\n", "test_a.py::test_a", "only calls, classes"),
        ("import cart\ndef test_a(): cart.TOTAL = 3\n", "test_a.py::test_a", "only calls, classes"),
        ("import cart\ndef test_a(): print(cart)\n", "test_a.py::test_a", "used as an object"),
        ("import cart\ndef test_a():\n cart = 1\n", "test_a.py::test_a", "used as an object"),
        ("def test_a():\n    import cart\n", "test_a.py::test_a", "must be at the top of the file"),
        ("import os, cart\ndef test_a(): pass\n", "test_a.py::test_a", "by lines of their own"),
        ("def test_b(): pass\n", "test_a.py::test_a", "has no such function"),
        ("def test_a(:\n", "test_a.py::test_a", "is not valid Python"),
        ("", "tests.test_b.TestB.test_b", "its file must be one of `tests`"),
    ],
)
def test_what_cannot_run_apart_is_refused(text: str, name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_apart([name], {"test_a.py": text}, {"cart.py"})
