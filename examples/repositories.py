"""Writes rows with tiny repositories, each with one fault and hidden tests (agentrl/extras/boxes/README.md).

python examples/repositories.py runs/repositories/data
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Fault:
    """One repository. `wrong` stands in `code` where `right` belongs.

    mended, kept: bodies of tests that fail with the fault, and that pass with and without it.
    """

    module: str
    issue: str
    code: str
    right: str
    wrong: str
    mended: str
    kept: str


FAULTS = (
    Fault(
        "cart",
        "`total` counts the items in place of adding their prices.",
        "def total(prices):\n    return {}\n",
        "sum(prices)",
        "len(prices)",
        "self.assertEqual(total([2, 3]), 5)",
        "self.assertEqual(total([]), 0)",
    ),
    Fault(
        "years",
        "1900 was no leap year, but `is_leap` says it was.",
        "def is_leap(year):\n    return {}\n",
        "year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)",
        "year % 4 == 0",
        "self.assertFalse(is_leap(1900))",
        "self.assertTrue(is_leap(2000) and is_leap(2024))",
    ),
    Fault(
        "words",
        "`words` returns empty words where two blanks follow each other.",
        "def words(text):\n    return {}\n",
        "text.split()",
        'text.split(" ")',
        'self.assertEqual(words("a  b"), ["a", "b"])',
        'self.assertEqual(words("a b"), ["a", "b"])',
    ),
    Fault(
        "stack",
        "`Stack.pop` takes the oldest item; it should take the newest.",
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
        "    def push(self, item):\n        self.items.append(item)\n\n"
        "    def pop(self):\n        return {}\n",
        "self.items.pop()",
        "self.items.pop(0)",
        "s = Stack(); s.push(1); s.push(2); self.assertEqual(s.pop(), 2)",
        "s = Stack(); s.push(1); self.assertEqual(s.pop(), 1)",
    ),
    Fault(
        "pages",
        "The last page is missing if it is not full.",
        "def num_pages(items, size):\n    return {}\n",
        "-(-items // size)",
        "items // size",
        "self.assertEqual(num_pages(11, 5), 3)",
        "self.assertEqual(num_pages(10, 5), 2)",
    ),
    Fault(
        "limits",
        "`clamp` ignores the lower bound.",
        "def clamp(value, low, high):\n    return {}\n",
        "max(low, min(value, high))",
        "min(value, high)",
        "self.assertEqual(clamp(-1, 0, 5), 0)",
        "self.assertEqual((clamp(9, 0, 5), clamp(3, 0, 5)), (5, 3))",
    ),
    Fault(
        "names",
        "`initials` fails for an empty name; it should return an empty text.",
        'def initials(name):\n    return "".join({} for part in name.split(" ")).upper()\n',
        "part[:1]",
        "part[0]",
        'self.assertEqual(initials(""), "")',
        'self.assertEqual(initials("ada lovelace"), "AL")',
    ),
    Fault(
        "middle",
        "The median of an even number of values is the mean of the two in the middle.",
        "def median(values):\n    values = sorted(values)\n    half = len(values) // 2\n    return {}\n",
        "values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2",
        "values[half]",
        "self.assertEqual(median([4, 1, 3, 2]), 2.5)",
        "self.assertEqual(median([3, 1, 2]), 2)",
    ),
    Fault(
        "counts",
        "`count` remembers words of earlier calls.",
        "def count(words, {}):\n    found = {{}} if found is None else found\n"
        "    for word in words:\n        found[word] = found.get(word, 0) + 1\n    return found\n",
        "found=None",
        "found={}",
        'count(["a"]); self.assertEqual(count(["a"]), {"a": 1})',
        'self.assertEqual(count(["b", "b"]), {"b": 2})',
    ),
    Fault(
        "search",
        "`find` misses a value at the end of the list.",
        "def find(values, value):\n    low, high = 0, {}\n    while low < high:\n"
        "        half = (low + high) // 2\n"
        "        if values[half] == value:\n            return half\n"
        "        low, high = (half + 1, high) if values[half] < value else (low, half)\n    return -1\n",
        "len(values)",
        "len(values) - 1",
        "self.assertEqual(find([1, 2, 3], 3), 2)",
        "self.assertEqual((find([1, 2, 3], 1), find([1, 2, 3], 9)), (0, -1))",
    ),
    Fault(
        "order",
        "`ranked` sorts equal scores by name backwards.",
        "def ranked(scores):\n    return sorted(scores, key=lambda name: {})\n",
        "(-scores[name], name)",
        "(-scores[name], [-ord(c) for c in name])",
        'self.assertEqual(ranked({"b": 1, "a": 1}), ["a", "b"])',
        'self.assertEqual(ranked({"a": 1, "b": 2}), ["b", "a"])',
    ),
    Fault(
        "roman",
        "`roman` writes 4 as IIII.",
        "PARTS = {}\n\n\ndef roman(number):\n    text = ''\n    for value, letters in PARTS:\n"
        "        while number >= value:\n            text, number = text + letters, number - value\n"
        "    return text\n",
        '[(10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]',
        '[(10, "X"), (5, "V"), (1, "I")]',
        'self.assertEqual((roman(4), roman(9)), ("IV", "IX"))',
        'self.assertEqual(roman(16), "XVI")',
    ),
)

TESTS = """import unittest

from {module} import *


class TestIt(unittest.TestCase):
    def test_mended(self):
        {mended}

    def test_kept(self):
        {kept}
"""
PROMPT = """Mend the fault in the repository of your working folder. Look at the files first; when you are
done, answer without a call.

{issue}"""


def row(fault: Fault) -> dict[str, Any]:
    tests = TESTS.format(module=fault.module, mended=fault.mended, kept=fault.kept)
    name = f"tests.test_{fault.module}.TestIt"
    return {
        "data_source": "repositories",
        "prompt": [{"role": "user", "content": PROMPT.format(issue=fault.issue)}],
        "agent_name": "tool_agent",
        "extra_info": {
            "instance_id": fault.module,
            "environment_kwargs": {
                "name": "repository",
                "files": {
                    f"{fault.module}.py": fault.code.format(fault.wrong),
                    "README.md": f"# {fault.module}\n",
                    "tests/__init__.py": "",
                },
                "tests": {f"tests/test_{fault.module}.py": tests},
                "fail_to_pass": [f"{name}.test_mended"],
                "pass_to_pass": [f"{name}.test_kept"],
            },
        },
    }


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{json.dumps(row(fault))}\n" for fault in FAULTS)
    (folder / "train.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
