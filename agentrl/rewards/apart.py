"""Tests of a repository, prepared to run in a process that has none of the repository's code.

A test file that takes names from the repository gets proxies of them, as the tests of the reward `code` do.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from agentrl.rewards.code_tests import PACKAGES, Suite, read_suite

FOLDER = "repository"
"""Where the repository lies beside the program."""
HERE = f"import os, sys\nsys.path.insert(0, os.path.abspath({FOLDER!r}))\nos.chdir({FOLDER!r})\n"
KNOWN = frozenset({*sys.stdlib_module_names, *PACKAGES, "pytest"})
"""Modules that a test imports in its own process."""
ONE_TEST = """
import unittest as _unittest
_outcome = _unittest.TestResult()
_unittest.TestSuite([{name}({method!r})]).run(_outcome)
assert _outcome.wasSuccessful() and _outcome.testsRun == 1 and not _outcome.skipped
"""


@dataclass(frozen=True, slots=True)
class ApartTests:
    """The tests of one file.

    program: source that takes from the repository what they need. names: of the suite's cases, in order.
    """

    program: str
    suite: Suite
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NamedTest:
    """path: of its file. parts: class and method, or a function. is_unittest: its name is a dotted one."""

    name: str
    path: str
    parts: tuple[str, ...]
    is_unittest: bool


def read_apart(
    names: Sequence[str], tests: Mapping[str, str], modules: Collection[str]
) -> tuple[ApartTests, ...]:
    """Prepare tests, grouped by file.

    Args:
        names: dotted names of unittest, or node ids of pytest.
        tests: path -> text of the files that have them.
        modules: names at the top level of the repository, as the row has it. What the model adds to them
            takes no place of a module that a test knows.

    Raises:
        ValueError: a test cannot run apart; the message says why.
    """
    found: dict[str, list[NamedTest]] = {}
    for name in dict.fromkeys(names):
        test = _named(name, tests)
        found.setdefault(test.path, []).append(test)
    return tuple(_of_file(tests[path], path, named, modules) for path, named in found.items())


def _of_file(text: str, path: str, named: Iterable[NamedTest], modules: Collection[str]) -> ApartTests:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is not valid Python: {error}") from error
    taken = _take(tree, path, modules)
    own = ast.unparse(ast.fix_missing_locations(tree))
    suite = read_suite([f"{own}\n{_call(tree, test)}" for test in named])
    return ApartTests(HERE + "\n".join(taken), suite, tuple(test.name for test in named))


def _named(name: str, tests: Mapping[str, str]) -> NamedTest:
    if "::" in name:
        path, *parts = name.split("::")
        if path in tests and 1 <= len(parts) <= 2 and all(part.isidentifier() for part in parts):
            return NamedTest(name, path, tuple(parts), is_unittest=False)
    else:
        module, _, last = name.rpartition(".")
        module, _, case = module.rpartition(".")
        path = f"{module.replace('.', '/')}.py"
        if path in tests and case.isidentifier() and last.isidentifier():
            return NamedTest(name, path, (case, last), is_unittest=True)
    raise ValueError(f"test {name!r}: its file must be one of `tests`, which has {', '.join(sorted(tests))}")


def _take(tree: ast.Module, path: str, modules: Collection[str]) -> list[str]:
    """Replace imports from the repository by such from the program; return the program's imports.

    Raises:
        ValueError: an import is relative, or not at the top of the file.
    """
    taken: list[str] = []
    for place, node in enumerate(tree.body):
        if isinstance(node, ast.ImportFrom) and _is_of_program(node.module, modules, node.level, path):
            taken.append(ast.unparse(node))
            names = [alias.asname or alias.name for alias in node.names if alias.name != "*"]
            tree.body[place] = _from_program(names)
        elif isinstance(node, ast.Import):
            ours = [alias for alias in node.names if _is_of_program(alias.name, modules, 0, path)]
            if ours and len(ours) < len(node.names):
                raise ValueError(
                    f"{path}: `{ast.unparse(node)}`: import modules of the repository by lines of their own"
                )
            if ours:
                taken.append(ast.unparse(node))
                tree.body[place] = _from_program(
                    [alias.asname or alias.name.partition(".")[0] for alias in ours]
                )
    top = {id(node) for node in tree.body}
    for inner in ast.walk(tree):
        name = inner.module if isinstance(inner, ast.ImportFrom) else None
        names = [alias.name for alias in inner.names] if isinstance(inner, ast.Import) else [name or ""]
        is_below = isinstance(inner, (ast.Import, ast.ImportFrom)) and id(inner) not in top
        if is_below and any(_is_of_program(one, modules, getattr(inner, "level", 0), path) for one in names):
            raise ValueError(f"{path}: `{ast.unparse(inner)}` must be at the top of the file")
    return taken


def _from_program(names: list[str]) -> ast.stmt:
    if not names:  # `import *`: whatever the test uses and does not define comes from the program
        return ast.Pass()
    return ast.ImportFrom("solution", [ast.alias(name) for name in names], 0)


def _is_of_program(name: str | None, modules: Collection[str], level: int, path: str) -> bool:
    if level or name is None:
        raise ValueError(f"{path}: relative imports cannot be made apart from the repository")
    top = name.partition(".")[0]
    return name != "solution" and (top in modules or top not in KNOWN)


def _call(tree: ast.Module, test: NamedTest) -> str:
    """Return the text that runs one test of a file.

    Raises:
        ValueError: the file has no such test, or pytest must give it something.
    """
    first, *rest = test.parts
    found = next((node for node in tree.body if getattr(node, "name", None) == first), None)
    inside = found.body if isinstance(found, ast.ClassDef) and rest else tree.body
    wanted = rest[0] if rest else first
    function = next((node for node in inside if getattr(node, "name", None) == wanted), None)
    if not isinstance(function, ast.FunctionDef):
        raise ValueError(f"test {test.name!r}: {test.path} has no such function")
    if test.is_unittest or (isinstance(found, ast.ClassDef) and _has_base(found)):
        return ONE_TEST.format(name=first, method=wanted)
    needed = len(function.args.args) - len(function.args.defaults) - bool(rest)
    if function.decorator_list or needed > 0:
        raise ValueError(f"test {test.name!r} needs pytest: it has decorators or arguments")
    return (
        f"_case = {first}()\ngetattr(_case, 'setup_method', bool)()\n_case.{wanted}()"
        if rest
        else f"{first}()"
    )


def _has_base(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).rpartition(".")[2] == "TestCase" for base in node.bases)


def top_level(paths: Iterable[str]) -> frozenset[str]:
    """Return the names that paths of a repository have at its top, without `.py`."""
    return frozenset(PurePosixPath(path).parts[0].removesuffix(".py") for path in paths)
