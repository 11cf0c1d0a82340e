"""Repositories whose tests judge the change: a right one, a wrong one, and those that attack the proof."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.extras.boxes.proof import added_modules, patched_files, proven, read_proof
from agentrl.testing import Call, play
from agentrl.types import JsonObject, Outcome, Trajectory

CONFIG = {"max_boxes": 1, "command_timeout_s": 25.0, "tests_timeout_s": 100.0}
HIDDEN = """import numbers
import unittest
from cart import total

class TestTotal(unittest.TestCase):
    def test_sum(self):
        self.assertEqual(total([1, 2]), 3)

    def test_empty(self):
        self.assertEqual(total([]), 0)
"""
MUTE = "import unittest; unittest.TestCase.assertEqual = print"
PASSING = (
    "printf 'import unittest\\nclass TestTotal(unittest.TestCase):\\n"
    "  def test_sum(self): pass\\n  def test_empty(self): pass\\n' >"
)
FAKING = f"echo {MUTE!r} >"
COMPILED = (
    "mkdir -p tests/__pycache__; python3 -c \"import py_compile as p; p.compile('fake.py', {0!r}, "
    'invalidation_mode=p.PycInvalidationMode.UNCHECKED_HASH)"'
)
ROW: JsonObject = {
    "files": {"cart.py": "def total(items):\n    return len(items)\n", "tests/__init__.py": ""},
    "tests": {"tests/test_cart.py": HIDDEN},
    "fail_to_pass": ["tests.test_cart.TestTotal.test_sum"],
    "pass_to_pass": '["tests.test_cart.TestTotal.test_empty"]',
}
RIGHT = Call("edit", {"path": "cart.py", "old": "len(items)", "new": "sum(items)"})


def attempt(
    *calls: Call, row: JsonObject = ROW, apart: bool | None = False, **settings: object
) -> Trajectory:
    return play(
        [*calls, "done"],
        environment="repository",
        environment_kwargs=dict(row),
        environment_config={"repository": dict(CONFIG)},
        reward="tests_pass",
        reward_config={"timeout_s": 200.0, "reward_config": {"tests_pass": {"apart": apart}}},
        max_turns=len(calls) + 1,
        **settings,
    )


def bash(command: str) -> Call:
    return Call("bash", {"command": command})


HOOK = "def pytest_runtest_makereport(item, call):\n    call.excinfo = None\n"
SETTINGS_OF_PYTEST = {
    "conftest.py": HOOK,
    "tests/conftest.py": HOOK,
    "__init__.py": MUTE,
    "tests/test_cart/__init__.py": "def test_sum(): pass",
    **dict.fromkeys(("pytest.toml", ".pytest.toml"), '[pytest]\naddopts = ["-p", "evil"]\n'),
}


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
        *(
            f"mkdir -p tests/test_cart; {PASSING} tests/test_cart/__init__.py",
            f"rm -rf tests; {PASSING} tests.py",
        ),
        f"{PASSING} fake.py; {COMPILED.format('tests/__pycache__/test_cart.cpython-311.pyc')}",
        f"echo > __init__.py; {FAKING} tests/__init__.py; {FAKING} __init__.py",
        f"echo {MUTE!r} > numbers.py",
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
    assert trajectory.metrics["reward/tests_pass/resolved"] == 1.0
    assert patched_files(patch) == {"tests/test_cart.py"}


def test_pytest_runs_tests_by_their_node_ids_and_a_changed_conftest_decides_nothing() -> None:
    test = "import cart\n\ndef test_sum():\n    assert cart.total([1, 2]) == 3\n"
    row = {
        "files": {"cart.py": "def total(items):\n    return len(items)\n"},
        "tests": {"tests/test_cart.py": test},
        "fail_to_pass": ["tests/test_cart.py::test_sum"],
        "runner": "pytest",
    }
    assert reward_of(RIGHT, row=row) == 1.0
    for path, text in SETTINGS_OF_PYTEST.items():
        calls = [
            Call("edit", {"path": path, "old": "", "new": text})
            for path, text in (("evil.py", HOOK), (path, text))
        ]
        assert reward_of(*calls, row=row) == 0.0, path


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


TESTS = frozenset({"tests/a.py", "x/y/test_b.py", "test_c.py"})
PATHS = [
    "a.py",
    "tests/a.py",
    "tests/b.py",
    "conftest.py",
    "x/pyproject.toml",
    "x/c.py",
    "x/y/z.py",
    "d/e.txt",
]
FORBIDDEN = [
    *("tests.py", "tests/__init__.py", "x.py", "x/__init__.py", "x/y.so", "x/y/test_b/c.py", "test_c.so"),
    *("new.toml", "d/__pycache__/e.pyc", "x/p.pth", "d/conftest.py", "test_c/__init__.py"),
]
NEW = ["new.py", "d/new.txt", "new/data.bin", "x/new.py", "x/y/new.py"]


def folders(paths: list[str]) -> st.SearchStrategy[dict[str, bytes]]:
    return st.dictionaries(st.sampled_from(paths), st.binary(max_size=4))


@given(folders(PATHS), folders([*PATHS, *FORBIDDEN, *NEW]))
@settings(max_examples=200)
def test_what_decides_the_tests_is_of_the_row_and_the_rest_of_the_model(original, changed) -> None:
    original |= {"x/y/code.py": b""}
    found = contents(proven(folder(changed), read_proof(folder(original), TESTS)))
    for path in {*changed, *original}:
        is_rows = path in TESTS or path.startswith("tests/") or path in ("conftest.py", "x/pyproject.toml")
        expected = None if path in FORBIDDEN else (original if is_rows else changed).get(path)
        assert found.get(path) == expected


def test_links_count_as_the_row_has_them_and_further_names_of_a_file_are_files() -> None:
    def linked(**targets: str) -> bytes:
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            tar.addfile(tarfile.TarInfo("a.py"))
            for name, target in targets.items():
                member = tarfile.TarInfo(name)
                member.type = tarfile.LNKTYPE if target == "a.py" else tarfile.SYMTYPE
                member.linkname = target
                tar.addfile(member)
        return archive.getvalue()

    proof = read_proof(linked(kept="x", moved="x"), {"tests/a.py"})
    with tarfile.open(
        fileobj=io.BytesIO(
            proven(linked(kept="x", moved="/etc", added="x", tests="/etc", hard="a.py"), proof)
        )
    ) as tar:
        assert {member.name: member.linkname for member in tar} == {"a.py": "", "kept": "x"}
    assert "hard.py" in contents(proven(linked(**{"hard.py": "a.py"}), proof))


def test_files_of_named_tests_are_tests() -> None:
    names = ["tests.test_a.TestA.test_b", "pkg/test_c.py::test_d", "missing.TestA.test_b"]
    files = folder({"tests/test_a.py": b"", "pkg/test_c.py": b"", "tests.py": b""})
    assert read_proof(files, (), names).tests == {"tests/test_a.py", "pkg/test_c.py", "tests.py"}


def test_added_modules_are_those_that_could_be_imported_in_place_of_others() -> None:
    proof = read_proof(folder({"src/a.py": b"", "pkg/__init__.py": b""}), {"tests/a.py"})
    added = ["json.py", "src/json.py", "pkg/json.py", "data/json.py", "a.txt"]
    assert added_modules(folder(dict.fromkeys(added, b"")), proof) == ["json.py", "src/json.py"]
