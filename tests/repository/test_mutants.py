"""The mutator behind `make mutants`: what it changes, and that its map fits the tree."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from mutants.__main__ import is_equivalent
from mutants.covered import EQUIVALENT, FOLDERS, MODULES, covered
from mutants.mutate import Mutant, mutants

ROOT = Path(__file__).parents[2]


def changes(text: str) -> set[str]:
    """The mutants of a module, each as its lines that differ."""
    source = text.encode()
    return {mutant.diff(source).partition("\n+")[2] for mutant in mutants("a.py", source)}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = a < b", {"x = a <= b", "x = a >= b"}),
        ("x = a == b", {"x = a != b"}),
        ("x = a is not b", {"x = a is b"}),
        ("x = a not in b", {"x = a in b"}),
        ("x = a < b < c", {"x = a <= b < c", "x = a >= b < c", "x = a < b <= c", "x = a < b >= c"}),
        ("x = (a) - (b)", {"x = (a) + (b)"}),
        ("x = a // b", {"x = a * b"}),
        ("x += y", {"x -= y", "pass"}),
        ("x = a and b or c", {"x = a or b or c", "x = a and b and c"}),
        ("x = not a", {"x = (a)"}),
        ("x = -a", {"x = (a)"}),
        ("x = a if b else c", {"x = a if (not (b)) else c"}),
        ("x = 2", {"x = 3", "x = 1"}),
        ("x = 0.5", {"x = 1.0"}),
        ("x = True", {"x = False"}),
        ("x = a[b:c]", {"x = a[(b) + 1:c]", "x = a[b:(c) + 1]"}),
        ("x = max(a)", {"x = min(a)"}),
        ("x = torch.all(a)", {"x = torch.any(a)"}),
        ("f(a)", {"pass"}),
        ("a.b = c", {"pass"}),
        ("x = [a for a in b if c]", {"x = [a for a in b if True]"}),
        ("MAX_A = 4 * 2**10", {"MAX_A = (4 * 2**10) * 1000", "MAX_A = (4 * 2**10) // 1000"}),
        ("MAX_A: Final = 0.5", {"MAX_A: Final = (0.5) * 1000", "MAX_A: Final = (0.5) / 1000"}),
        ("A = -1", {"A = (-1) * 1000"}),
        ("A = 2 * b", {"A = 2 / b", "A = 3 * b", "A = 1 * b"}),
        ("x = 'é' + a", {"x = 'é' - a"}),  # columns are bytes
    ],
)
def test_the_mutants_of_a_line(line, expected):
    assert changes(line) == expected


def test_what_is_as_false_is_no_mutant():
    assert changes("def f():\n    return False") == {"    return True"}
    assert changes("def f():\n    return True") == {"    return False", "    return None"}


def test_statements_of_functions_and_loops():
    text = "def f(a):\n    for b in a:\n        if b:\n            continue\n        break\n    return a\n"
    assert {line.strip() for line in changes(text)} == {"if (not (b)):", "break", "continue", "return None"}


@pytest.mark.parametrize(
    "text",
    [
        "import a",
        "def f(a: Literal[1] | None) -> Literal[2]: ...",
        "@f(1)\nclass A: ...",
        "assert a < 1",
        "x = zip(a, strict=True)",
        "assert_never(x)",
        "TYPE_CHECKING = False",
        "if TYPE_CHECKING:\n    x = 1",
        "x = None",
        "'a text'",
    ],
)
def test_what_no_test_should_see_is_left_alone(text):
    assert changes(text) == set()


def test_an_error_is_dropped_but_its_text_is_not_changed():
    assert changes("raise ValueError(f'{a + 1} of {b}', 2)") == {"pass"}


def test_every_mutant_compiles_and_differs():
    source = (ROOT / "agentrl/buffer/lineage.py").read_bytes()
    found = mutants("lineage.py", source)
    assert len({mutant.of(source) for mutant in found}) == len(found) > 50
    original = ast.dump(ast.parse(source))
    assert all(ast.dump(ast.parse(mutant.of(source))) != original for mutant in found)
    assert all(1 <= mutant.line <= source.count(b"\n") for mutant in found)


def test_the_map_names_modules_and_tests_that_exist():
    assert all((ROOT / path).exists() for path in (*MODULES, *FOLDERS))
    for path, tests in covered(ROOT).items():
        assert len(set(tests)) == len(tests), path
        assert [test for test in tests if not (ROOT / test).is_file()] == [], path
    assert {
        "agentrl/buffer/ledger.py",
        "agentrl/algorithms/advantages/gae.py",
        "agentrl/learner/step.py",
    } <= covered(ROOT).keys()


@pytest.mark.slow
def test_equivalent_mutants_are_mutants_of_the_code_as_it_is():
    found = set()
    for path in {path for path, _ in EQUIVALENT}:
        source = (ROOT / path).read_bytes()
        found |= {
            (path, line_of(mutant, source))
            for mutant in mutants(path, source)
            if is_equivalent(mutant, source)
        }
    assert found == set(EQUIVALENT)


def line_of(mutant: Mutant, source: bytes) -> str:
    return mutant.of(source).decode().splitlines()[mutant.line - 1].strip()


@pytest.mark.slow
def test_mutants_are_played_and_the_tree_stays_as_it_is(tmp_path):
    before = {path: (ROOT / path).read_bytes() for path in covered(ROOT)}
    command = [
        sys.executable,
        "-m",
        "mutants",
        "--sample",
        "2",
        "--seed",
        "1",
        "--only",
        "lineage",
        "--out",
        str(tmp_path / "found.json"),
    ]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, timeout=900)
    assert done.returncode in (0, 1), done.stderr
    assert "of 2 died" in done.stdout
    assert (tmp_path / "found.json").is_file()
    assert {path: (ROOT / path).read_bytes() for path in covered(ROOT)} == before
