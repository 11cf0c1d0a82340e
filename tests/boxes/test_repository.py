"""Repositories whose tests judge the change: a right one, a wrong one, and those that attack the proof."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.boxes.proof import patched_files, protected, proven
from agentrl.testing import Call, play
from agentrl.types import JsonObject, Outcome, Trajectory

CONFIG = {"max_boxes": 1, "command_timeout_s": 25.0}
HIDDEN = """import unittest
from cart import total

class TestTotal(unittest.TestCase):
    def test_sum(self):
        self.assertEqual(total([1, 2]), 3)

    def test_empty(self):
        self.assertEqual(total([]), 0)
"""
ROW: JsonObject = {
    "files": {"cart.py": "def total(items):\n    return len(items)\n", "tests/__init__.py": ""},
    "tests": {"tests/test_cart.py": HIDDEN},
    "fail_to_pass": ["tests.test_cart.TestTotal.test_sum"],
    "pass_to_pass": '["tests.test_cart.TestTotal.test_empty"]',
}
RIGHT = Call("edit", {"path": "cart.py", "old": "len(items)", "new": "sum(items)"})


def attempt(*calls: Call, row: JsonObject = ROW, **settings: object) -> Trajectory:
    return play(
        [*calls, "done"],
        environment="repository",
        environment_kwargs=dict(row),
        environment_config={"repository": dict(CONFIG)},
        reward="tests_pass",
        max_turns=len(calls) + 1,
        **settings,
    )


def bash(command: str) -> Call:
    return Call("bash", {"command": command})


def reward_of(*calls: Call, row: JsonObject = ROW) -> float:
    trajectory = attempt(*calls, row=row)
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.failure
    return sum(reward.value for reward in trajectory.rewards)


def test_the_right_change_is_rewarded_and_others_are_not() -> None:
    assert reward_of(RIGHT) == 1.0
    assert reward_of() == 0.0
    # It mends one and breaks the other.
    assert (
        reward_of(Call("edit", {"path": "cart.py", "old": "len(items)", "new": "items[0] + items[1]"})) == 0.0
    )


@pytest.mark.parametrize(
    "command",
    [
        "mkdir -p tests; echo > tests/test_cart.py",
        "echo 'import os; os._exit(0)' > cart.py",
        "echo 'raise SystemExit(0)' > cart.py",
        "printf 'class TestResult: pass\\nprint(1)\\n' | tee unittest.py json.py sitecustomize.py",
        "rm -rf tests && ln -s /etc tests",
        "rm -rf tests && echo > tests",
        "kill -9 -1",
        "rm -rf * && ln -s /dev/zero cart.py",
    ],
)
def test_an_attack_on_the_proof_earns_nothing_and_fails_no_attempt(command: str) -> None:
    assert reward_of(bash(command)) == 0.0


def test_tests_may_come_as_a_patch_which_the_model_does_not_see() -> None:
    lines = "".join(f"+{line}\n" for line in HIDDEN.splitlines())
    patch = f"--- /dev/null\n+++ b/tests/test_cart.py\n@@ -0,0 +1,{len(HIDDEN.splitlines())} @@\n{lines}"
    row = {**{key: value for key, value in ROW.items() if key != "tests"}, "test_patch": patch}
    trajectory = attempt(bash("ls tests"), RIGHT, row=row)
    answers = [message.content for message in trajectory.messages if message.role == "tool"]
    assert answers == ["__init__.py", "changed cart.py"]
    assert trajectory.extra_info["environment_facts"]["resolved"] is True
    assert patched_files(patch) == {"tests/test_cart.py"}


def test_pytest_runs_tests_by_their_node_ids_and_a_changed_conftest_decides_nothing() -> None:
    test = "import cart\n\ndef test_sum():\n    assert cart.total([1, 2]) == 3\n"
    row = {
        "files": {"cart.py": "def total(items):\n    return len(items)\n"},
        "tests": {"tests/test_cart.py": test},
        "fail_to_pass": ["tests/test_cart.py::test_sum"],
        "runner": "pytest",
    }
    hook = "def pytest_runtest_makereport(item, call):\n    call.excinfo = None\n"
    assert reward_of(RIGHT, row=row) == 1.0
    assert reward_of(Call("edit", {"path": "conftest.py", "old": "", "new": hook}), row=row) == 0.0


def folder(files: dict[str, bytes]) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return archive.getvalue()


def contents(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


PATHS = st.sampled_from(
    ["a.py", "b.py", "tests/a.py", "tests/b.py", "conftest.py", "x/pyproject.toml", "x/p.pth"]
)
FOLDERS = st.dictionaries(PATHS, st.binary(max_size=4))


@given(FOLDERS, FOLDERS, st.frozensets(PATHS))
@settings(max_examples=100)
def test_what_decides_the_tests_is_of_the_row_and_the_rest_of_the_model(changed, original, proofs) -> None:
    found = contents(proven(folder(changed), protected(folder(original), proofs), proofs))
    for path in {*changed, *original}:
        is_row = path in proofs or path in ("conftest.py", "x/pyproject.toml", "x/p.pth")
        assert found.get(path) == (original if is_row else changed).get(path)
