"""A package of somebody else's: installed from its folder, found by its entry points, checked by its own
tests.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent / "third_party_package"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Install a copy of the package (building writes into its folder), and return an environment that sees
    it.
    """
    folder = tmp_path_factory.mktemp("third_party")
    shutil.copytree(PACKAGE, folder / "package")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--quiet",
    ]
    subprocess.run(
        [*command, "--target", folder / "site", folder / "package"], check=True, capture_output=True
    )
    return {**os.environ, "PYTHONPATH": str(folder / "site"), "OMP_NUM_THREADS": "1"}


def test_its_own_tests_pass(installed: dict[str, str], tmp_path: Path) -> None:
    shutil.copytree(PACKAGE / "checks", tmp_path / "checks")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "checks")]
    done = subprocess.run(command, env=installed, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout


def test_it_is_listed_with_its_source_and_schema(installed: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agentrl.cli", "plugins", "--json"]
    done = subprocess.run(command, env=installed, cwd=tmp_path, capture_output=True, text=True, check=True)
    listed = {(info["kind"], info["name"]): info for info in json.loads(done.stdout)}
    tool = listed["tool", "word_count"]
    assert tool["source"] == "acme-plugins 1.0: acme_plugins.word_count:word_count"
    assert tool["description"] == "Count the words of a text."
    assert tool["parameters"]["properties"] == {"text": {"type": "string", "description": "any text"}}
    assert {("interaction", "twenty_questions"), ("agent", "two_drafts"), ("reward", "brevity")} <= set(
        listed
    )
