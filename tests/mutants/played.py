"""Play mutants: a copy of the tree holds the mutated file, and a fork of this process, which has imported
what is slow, runs pytest in it.

So the work tree is never touched, the mutant is also seen by the processes that tests start, and it costs no
start of torch.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SLOW_TO_IMPORT = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "ray",
    "trio",
    "pydantic",
    "yaml",
    "numpy",
    "scipy.stats",
    "pyarrow.parquet",
    "pandas",
    "sympy",
    "transformers",
    "transformers.models.qwen2.modeling_qwen2",
    "safetensors.torch",
    "peft",
    "httpx",
    "openai",
    "mcp",
    "matplotlib.pyplot",
    "rich.console",
    "jinja2",
    "jsonschema",
    "hypothesis",
    "pytest",
)
PACKAGED = ("agents", "configs", "docs", "interactions", "tools")
"""Folders of the root that are imported as parts of agentrl."""

Verdict = Literal["killed", "survived", "timed out"]

MAX_BYTES = 8 * 2**30
"""Of memory per process: a changed size must not take the machine's."""


@dataclass(frozen=True)
class Played:
    """What became of one run of tests. seconds: from its fork to its end."""

    verdict: Verdict
    seconds: float
    output: str


class Stage:
    """A copy of the tracked files of `root` in `folder`, in which tests run with one of the files `mutated`
    changed.
    """

    def __init__(self, root: Path, folder: Path, mutated: Collection[str]) -> None:
        self._folder = folder
        self._log = folder / "pytest.log"
        names = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            check=True,
            capture_output=True,
            text=True,
        )
        for name in names.stdout.splitlines():
            if (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / name, folder / name)
        for name in PACKAGED:
            (folder / "agentrl" / name).symlink_to(folder / name)
        (folder / ".venv").symlink_to(root / ".venv")
        os.environ["PYTHONPATH"] = str(folder)
        os.environ.setdefault("AGENTRL_SHARED", str(root.parent / "shared"))  # beside the copy, for tests
        os.environ["OMP_NUM_THREADS"] = "1"
        sys.path[:0] = [str(folder), str(folder / "tests")]
        for module in [*SLOW_TO_IMPORT, *never_mutated(folder, mutated)]:
            with contextlib.suppress(ImportError):  # it is only quicker with it
                importlib.import_module(module)
        _without_shrinking()

    def play(self, path: str, source: bytes, tests: Sequence[str], *, deadline_s: float) -> Played:
        """Run `tests` with `source` in the place of the file at `path`."""
        file = self._folder / path
        original = file.read_bytes()
        try:
            self._write(file, source)
            return self.run(tests, deadline_s=deadline_s)
        finally:
            self._write(file, original)

    def _write(self, file: Path, source: bytes) -> None:
        file.write_bytes(source)
        # Python tells compiled code's age by seconds and size, in which mutants are alike.
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            compiled.unlink()

    def run(self, tests: Sequence[str], *, deadline_s: float) -> Played:
        """Run `tests` with the files as they are."""
        started = time.monotonic()
        child = os.fork()
        if not child:
            self._be_pytest(tests)
        status = _ended(child, started + deadline_s)
        _end_group(child)
        if status is None:
            os.waitpid(child, 0)
        seconds, output = time.monotonic() - started, self._log.read_text(errors="replace")
        if status is None:
            return Played("timed out", seconds, output)
        return Played("survived" if status == 0 else "killed", seconds, output)

    def _be_pytest(self, tests: Sequence[str]) -> None:
        """Become a process that runs the tests and ends; of its own group, which ends with it."""
        code = 1
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
            os.chdir(self._folder)
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(log, stream)
            import pytest

            marks = "not slow and not sglang and not gpu"
            code = pytest.main(
                [
                    "-x",
                    "-q",
                    "--tb=line",
                    "-W",
                    "ignore::pytest.PytestAssertRewriteWarning",
                    "-p",
                    "no:cacheprovider",
                    "--hypothesis-profile=mutants",
                    "-m",
                    marks,
                    *tests,
                ]
            )
        finally:
            os._exit(code)


def _without_shrinking() -> None:
    """A mutant is dead with the first example that fails, however large."""
    from hypothesis import Phase, settings

    settings.register_profile(
        "mutants",
        derandomize=True,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        report_multiple_bugs=False,
        database=None,
    )


def _ended(child: int, deadline: float) -> int | None:
    """Return the exit status of a child that ends until then."""
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.02)
    return None


def _end_group(child: int) -> None:
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        return


def never_mutated(root: Path, mutated: Collection[str]) -> list[str]:
    """Return the modules of agentrl that import none of the files `mutated`, also not by way of others."""
    files = {
        _module(path.relative_to(root)): path
        for path in (root / "agentrl").rglob("*.py")
        if not path.is_relative_to(root / "agentrl/docs")
    }
    imported = {
        name: {*_imports(ast.parse(path.read_bytes())), name.rpartition(".")[0]} & files.keys()
        for name, path in files.items()
    }
    changing = {_module(Path(path)) for path in mutated}
    while more := {name for name, others in imported.items() if others & changing} - changing:
        changing |= more
    return sorted(name for name in files.keys() - changing if not name.endswith("__main__"))


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _imports(node: ast.AST) -> Iterator[str]:
    """Yield what is imported as soon as a module is, not by a call of its functions."""
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=str(module), names=names):
            yield module
            yield from (f"{module}.{alias.name}" for alias in names)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _imports(child)
