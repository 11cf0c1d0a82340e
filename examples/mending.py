"""Writes rows of tiny repositories to mend, and conversations for the warm start.

See agentrl/extras/boxes/README.md.

    python examples/mending.py runs/mending/data

Each repository has one function with a wrong operator. The agent reads it with bash and edits it; hidden
tests are the reward. In the conversations the assistant writes the right operator in four of ten, a wrong one
in two, and edits nothing in the others. So the policy comes out of the warm start able to mend, and rarely
does.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from agentrl.extras.boxes.repository import Repository
from agentrl.plugins import environment_tools

OPERATORS = {"add": ("+", 10), "subtract": ("-", 4), "multiply": ("*", 21)}
"""Word of the issue -> operator, and its result for 7 and 3."""
CODE = "def f(a, b):\n    return a {} b\n"
TESTS = """import unittest

from f import f


class TestF(unittest.TestCase):
    def test_result(self):
        self.assertEqual(f(7, 3), {})

    def test_kind(self):
        self.assertIsInstance(f(1, 1), int)
"""
TOOLS = ("bash", "edit")
SHARE_RIGHT, SHARE_WRONG = 0.4, 0.2
NUM_ROWS = {"train": 512, "val": 32}
NUM_CONVERSATIONS = 512


def drawn(rng: random.Random) -> tuple[str, str, str]:
    """Return the word of the issue, the right operator, and the wrong one of the repository."""
    word = rng.choice(list(OPERATORS))
    right = OPERATORS[word][0]
    return word, right, rng.choice([operator for operator, _ in OPERATORS.values() if operator != right])


def row(rng: random.Random) -> dict[str, Any]:
    word, _, wrong = drawn(rng)
    return {
        "data_source": "mending",
        "prompt": [{"role": "user", "content": f"f must {word}"}],
        "agent_name": "tool_agent",
        "extra_info": {
            "tool_selection": list(TOOLS),
            "environment_kwargs": {
                "name": "repository",
                "files": {"f.py": CODE.format(wrong)},
                "tests": {"test_f.py": TESTS.format(OPERATORS[word][1])},
                "fail_to_pass": ["test_f.TestF.test_result"],
                "pass_to_pass": ["test_f.TestF.test_kind"],
            },
        },
    }


def conversation(rng: random.Random, tools: list[dict[str, Any]]) -> dict[str, Any]:
    word, right, wrong = drawn(rng)
    (other,) = {operator for operator, _ in OPERATORS.values()} - {right, wrong}
    luck = rng.random()
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": f"f must {word}"},
        *call("bash", {"command": "cat f.py"}, CODE.format(wrong).rstrip()),
    ]
    if luck < SHARE_RIGHT + SHARE_WRONG:
        written = right if luck < SHARE_RIGHT else other
        messages += call("edit", {"path": "f.py", "old": wrong, "new": written}, "changed f.py")
    return {"messages": [*messages, {"role": "assistant", "content": "done"}], "tools": tools}


def call(name: str, arguments: dict[str, str], answer: str) -> list[dict[str, Any]]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
        },
        {"role": "tool", "content": answer, "tool_call_id": "call00000", "name": name},
    ]


def write(folder: Path) -> None:
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, number in NUM_ROWS.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row(rng))}\n" for _ in range(number)))
    tools = [environment_tools(Repository)[name]().schema() for name in TOOLS]
    lines = (f"{json.dumps(conversation(rng, tools))}\n" for _ in range(NUM_CONVERSATIONS))
    (folder / "sft.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
