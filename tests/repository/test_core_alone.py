"""The core needs no extra: its modules are imported and its tests pass in a copy without `agentrl/extras`."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from parts.core_copy import ROOT, copy_core, output_of, without_extras

ABOUT_THE_REPOSITORY = ("repository", "docs", "gpu", "mutants", "sglang_cpu")
"""Folders of `tests` about all files of the repository, or about other machines."""
NEEDS_EXTRAS = {
    "seams/test_seams.py": "its run starts the embedded server, and `config explain` tells of its loss",
    "learner/test_one_process.py": "examples/one_process.py takes its rows from `agentrl.extras.datatools`",
}
"""Tests of the core that use an extra, and why. Only becomes shorter."""
WHOLE_RUN = "test_stop_and_resume"
"""Config, rows, agents, servers, buffer, learner, publish, checkpoint and resume."""
SELECTED = "not slow and not sglang and not gpu"

IMPORT_ALL = """
import importlib, json, pkgutil
import agentrl
found = [module.name for module in pkgutil.walk_packages(agentrl.__path__, "agentrl.")]
for name in found:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(json.dumps(found))
"""
REGISTERED = """
import json
from importlib.metadata import distributions
print(json.dumps([entry.value for package in distributions() for entry in package.entry_points]))
"""


def test_make_test_runs_what_needs_no_extra() -> None:
    others = re.search(r"^OTHERS = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = {word.removeprefix("tests/") for word in others[1].split()}
    of_seams = {name for name in NEEDS_EXTRAS if name.startswith("seams/")}
    with_tests = {name for name in ABOUT_THE_REPOSITORY if any((ROOT / "tests" / name).glob("test_*.py"))}
    assert named == {"extras", "seams", "repository", "docs"} | (NEEDS_EXTRAS.keys() - of_seams)
    assert with_tests - named <= {"gpu"}, "its tests are marked"


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory):
    return copy_core(tmp_path_factory.mktemp("alone") / "core")


def pytest_in(core, *words: str, timeout_s: float) -> str:
    left_out = [f"--ignore=tests/{name}" for name in (*ABOUT_THE_REPOSITORY, *NEEDS_EXTRAS)]
    options = ["-q", "-p", "no:cacheprovider", "-m", SELECTED, *left_out, *words]
    return output_of(core.command("-m", "pytest", *options, "tests"), timeout_s)


def test_no_extra_is_in_the_copy_nor_registered(core) -> None:
    assert not (core.folder / "agentrl/extras").exists()
    registered = json.loads(output_of(core.command("-c", REGISTERED), 60))
    assert "agentrl.servers.launch:SGLangServer" in registered
    assert [value for value in registered if value.startswith("agentrl.extras")] == []
    missing = core.command("-c", "import agentrl.extras")
    with pytest.raises(AssertionError, match=r"No module named 'agentrl\.extras'"):
        output_of(missing, 60)


def test_every_module_of_the_core_is_imported(core) -> None:
    imported = json.loads(output_of(core.command("-c", IMPORT_ALL), 120).splitlines()[-1])
    files = [path for path in (ROOT / "agentrl").rglob("*.py") if "extras" not in path.parts]
    assert len([path for path in files if path.stem != "__init__"]) <= len(imported)


@pytest.mark.timeout(600)
def test_the_cores_tests_are_found_and_a_whole_run_passes(core) -> None:
    """Collecting them imports all test files, and what they import."""
    said = pytest_in(core, "-k", WHOLE_RUN, timeout_s=550)
    assert re.search(r"^1 passed, [\d,]+ deselected", said, re.MULTILINE), said


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_tests_of_the_core_pass(core) -> None:
    said = pytest_in(core, "-n", "2", "--dist", "loadfile", timeout_s=3500)
    assert re.search(r"^\d+ passed", said, re.MULTILINE), said


def test_no_test_of_the_core_imports_an_extra() -> None:
    """Parts of the tests that extras share are among these: no test of the core imports them."""
    found = {
        str(path.relative_to(ROOT / "tests"))
        for path in (ROOT / "tests").rglob("test_*.py")
        if not {"extras", *ABOUT_THE_REPOSITORY} & set(path.relative_to(ROOT / "tests").parts)
        if any(name.startswith(("agentrl.extras", "agentrl.testing")) for name in imports_of(path))
    }
    assert found <= NEEDS_EXTRAS.keys()


def imports_of(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


def test_what_names_an_extra_leaves_the_project() -> None:
    project = """
[project.entry-points."agentrl.tools"]
calculator = "agentrl.tools.calculator:Calculator"
search = "agentrl.extras.search.search:Search"

[tool.setuptools]
packages = [
    "agentrl", "agentrl.extras", "agentrl.extras.agents", "agentrl.figures",
]
"""
    assert without_extras(project) == project.replace(
        'search = "agentrl.extras.search.search:Search"\n', ""
    ).replace('"agentrl.extras", "agentrl.extras.agents", ', "")
