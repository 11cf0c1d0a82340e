"""A copy of the repository without `agentrl/extras`, installed in an environment of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLUGIN_FOLDERS = ("agents", "tools", "interactions", "configs", "docs")
"""Folders of the root that pyproject.toml installs below `agentrl`."""
COPIED = (
    "agentrl",
    *PLUGIN_FOLDERS,
    "examples",
    "benchmarks",
    "tests",
    "README.md",
    "LICENSE",
    "pyproject.toml",
)
NEVER = shutil.ignore_patterns("__pycache__", "extras", "results")
"""Extras, their tests, and measured results."""


@dataclass(frozen=True)
class CoreCopy:
    """The copy in `folder`. `python` finds it, and the packages that the core depends on, but no extra."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / ".venv/bin/python"

    def command(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        """Start `python WORDS` in the copy, in a process group of its own. variables: of its environment."""
        environment = {name: value for name, value in os.environ.items() if name not in _OUTER}
        return subprocess.Popen(
            [str(self.python), *words],
            cwd=self.folder,
            env={**environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


_OUTER = {"PYTHONPATH", "VIRTUAL_ENV", "PYTEST_CURRENT_TEST", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"}
"""Variables by which the tests that run here would reach the tests in the copy."""


def copy_core(folder: Path) -> CoreCopy:
    """Write the copy into a new folder."""
    folder.mkdir(parents=True)
    for name in COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=NEVER)
        else:
            shutil.copy2(source, target)
    for name in PLUGIN_FOLDERS:
        (folder / "agentrl" / name).symlink_to(folder / name)
    project = folder / "pyproject.toml"
    project.write_text(without_extras(project.read_text()))
    core = CoreCopy(folder)
    _install(core)
    return core


def without_extras(project: str) -> str:
    """Return the text of pyproject.toml without what names `agentrl.extras`: entry points and packages."""
    project = re.sub(r'"agentrl\.extras[^"\n]*",[ ]?', "", project)
    lines = [line for line in project.splitlines() if "agentrl.extras" not in line]
    return "\n".join(lines) + "\n"


def _install(core: CoreCopy) -> None:
    """Give the copy an environment with the packages installed here, and itself in the repository's place."""
    environment = core.folder / ".venv"
    venv.create(environment, symlinks=True)
    site = _site_of(str(environment))
    for entry in _site_of(sys.prefix).iterdir():
        if "agentrl" not in entry.name and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    (site / "core.pth").write_text(f"{core.folder}\n")
    command = core.python.with_name("agentrl")
    command.write_text(f"#!{core.python}\nfrom agentrl.cli import main\n\nmain()\n")
    command.chmod(0o755)
    write_metadata = [str(core.python), "-c", "import setuptools; setuptools.setup()", "-q", "egg_info"]
    subprocess.run(write_metadata, cwd=core.folder, check=True, timeout=120, stdout=sys.stderr)


def _site_of(environment: str) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": environment, "platbase": environment}))


def output_of(process: subprocess.Popen[str], timeout_s: float) -> str:
    """Return what a process printed; end it, and all it started, after a time limit.

    Raises:
        AssertionError: it failed, or took too long.
    """
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"not within {timeout_s} s:\n{output}") from None
    assert process.returncode == 0, output
    return output
