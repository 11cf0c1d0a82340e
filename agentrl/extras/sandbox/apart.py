"""Tests of a repository, prepared to run in a process that has none of the repository's code.

A test file that takes names from the repository gets proxies of them, as the tests of the reward `code` do.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.extras.sandbox.code_tests import PACKAGES, Suite, read_suite

FOLDER = "repository"
"""Where the repository lies beside the program."""
HERE = f"import os, sys\nsys.path.insert(0, os.path.abspath({FOLDER!r}))\nos.chdir({FOLDER!r})\n"
REACHING = frozenset(
    {
        *("open", "__file__", "read_text", "read_bytes", "listdir", "glob", "chdir", "getcwd"),
        *("subprocess", "import_module", "__import__", "patch", "monkeypatch"),
    }
)
"""Names by which a test reaches files or modules of the repository without a proxy."""
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
    names: Sequence[str], tests: Mapping[str, str], paths: Collection[str]
) -> tuple[ApartTests, ...]:
    """Prepare tests, grouped by file.

    Args:
        names: dotted names of unittest, or node ids of pytest.
        tests: path -> text of the files that have them.
        paths: files and folders of the repository, as the row has it. What the model adds to them takes no
            place of a module that a test knows.

    Raises:
        ValueError: a test cannot run apart; the message says why.
    """
    found: dict[str, list[NamedTest]] = {}
    for name in dict.fromkeys(names):
        test = _named(name, tests)
        found.setdefault(test.path, []).append(test)
    modules = frozenset(path.removesuffix(".py").replace("/", ".") for path in paths)
    others = frozenset(path.removesuffix(".py").replace("/", ".") for path in tests)
    return tuple(_of_file(tests[path], path, named, modules, others) for path, named in found.items())


def _of_file(
    text: str, path: str, named: Iterable[NamedTest], modules: Collection[str], others: Collection[str]
) -> ApartTests:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is not valid Python: {error}") from error
    _refuse_reaching(tree, path)
    imports = Imports(path, frozenset(modules), frozenset(others))
    imports.take(tree)
    tree = ModuleNames(imports).visit(tree)
    tree.body[:0] = [
        ast.ImportFrom("solution", [ast.alias(name, shown if shown != name else None)], 0)
        for shown, name in imports.names.items()
    ]
    own = ast.unparse(ast.fix_missing_locations(tree))
    suite = read_suite([f"{own}\n{_call(tree, test)}" for test in named])
    return ApartTests(HERE + "\n".join(imports.taken.values()), suite, tuple(test.name for test in named))


def _refuse_reaching(tree: ast.Module, path: str) -> None:
    """Raise ValueError if a test reaches files or modules of the repository: they are not beside it."""
    for node in ast.walk(tree):
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if name in REACHING:
            raise ValueError(f"{path}: a test that uses `{name}` cannot run apart from the repository")


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


class Imports:
    """What a test file takes from the repository.

    taken: lines that the program runs, by the name of what they take. names: in the test file -> in the
    program, which are alike but for `as`. modules: names in the test file -> modules of the repository.
    """

    def __init__(self, path: str, modules: Collection[str], others: Collection[str]) -> None:
        """modules: all of the repository, with dots. others: those of the test files."""
        self.taken: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.modules: dict[str, str] = {}
        self.is_module = frozenset(modules).__contains__
        self._path, self._others = path, others
        self._tops = {module.partition(".")[0] for module in modules}

    def take(self, tree: ast.Module) -> None:
        """Replace imports from the repository by such from the program.

        Raises:
            ValueError: an import is relative, not at the top of the file, or of another test file.
        """
        tree.body[:] = [new for node in tree.body for new in self._taken(node)]
        for inner in ast.walk(tree):
            if isinstance(inner, (ast.Import, ast.ImportFrom)) and self._is_ours(inner):
                raise self._refused(inner, "must be at the top of the file")

    def _taken(self, node: ast.stmt) -> list[ast.stmt]:
        if not isinstance(node, (ast.Import, ast.ImportFrom)) or not self._is_ours(node):
            return [node]
        if isinstance(node, ast.ImportFrom):
            return self._from_module(node)
        if not all(map(self._is_of_program, (alias.name for alias in node.names))):
            raise self._refused(node, "import modules of the repository by lines of their own")
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            self.modules[name] = alias.name if alias.asname else name
        return []

    def _from_module(self, node: ast.ImportFrom) -> list[ast.stmt]:
        assert node.module is not None
        for alias in node.names:
            if self.is_module(f"{node.module}.{alias.name}"):
                self.modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            elif alias.name == "*":  # whatever the test uses and does not define comes from the program
                self.taken[node.module] = ast.unparse(node)
            else:
                line = f"from {node.module} import {alias.name}"
                self.add(alias.asname or alias.name, alias.name, line)
        return []

    def add(self, shown: str, name: str, line: str) -> None:
        """Take an object by a line of the program. Raises ValueError if another one has the name."""
        if self.taken.setdefault(name, line) != line:
            raise ValueError(f"{self._path}: two objects of the repository are named `{name}`")
        self.names[shown] = name

    def _is_ours(self, node: ast.Import | ast.ImportFrom) -> bool:
        if isinstance(node, ast.Import):
            return any(self._is_of_program(alias.name) for alias in node.names)
        if node.level or node.module is None:
            raise ValueError(f"{self._path}: relative imports cannot be made apart from the repository")
        if any(f"{node.module}.{alias.name}" in self._others for alias in node.names):
            raise self._refused(node, "another test file cannot be imported apart from the repository")
        return self._is_of_program(node.module)

    def _is_of_program(self, name: str) -> bool:
        if name in self._others:
            raise ValueError(f"{self._path}: `import {name}`: another test file cannot be imported apart")
        top = name.partition(".")[0]
        return name != "solution" and (top in self._tops or top not in KNOWN)

    def _refused(self, node: ast.stmt, why: str) -> ValueError:
        return ValueError(f"{self._path}: `{ast.unparse(node)}` {why}")


class ModuleNames(ast.NodeTransformer):
    """Replaces `cart.total`, of a module `cart` of the repository, by a name that comes from the program.

    Raises:
        ValueError: a module is used in another way, which a proxy cannot follow.
    """

    def __init__(self, imports: Imports) -> None:
        self._imports = imports
        self._called: set[int] = set()

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self._called.add(id(node.func))
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        module = self._module(node.value)
        if module is None or self._module(node) is not None:
            return self.generic_visit(node)
        is_fixed = id(node) in self._called or node.attr[:1].isupper()
        if not isinstance(node.ctx, ast.Load) or not is_fixed:
            raise ValueError(
                f"`{ast.unparse(node)}`: only calls, classes and capitalized values of a module run apart"
            )
        name = f"{node.attr}__{module.replace('.', '_')}"
        line = f"import {module}\nif hasattr({module}, {node.attr!r}): {node.attr} = {module}.{node.attr}"
        self._imports.add(name, node.attr, line)
        return ast.Name(name, ast.Load())

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self._imports.modules:
            raise ValueError(f"`{node.id}` is a module of the repository, and used as an object")
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        if node.arg in self._imports.modules:
            raise ValueError(f"`{node.arg}` is a module of the repository and an argument of a function")
        return node

    def _module(self, node: ast.expr) -> str | None:
        """Return the module that a name or a chain of attributes is; None if it is none."""
        if isinstance(node, ast.Name):
            return self._imports.modules.get(node.id)
        above = self._module(node.value) if isinstance(node, ast.Attribute) else None
        name = f"{above}.{node.attr}" if above is not None and isinstance(node, ast.Attribute) else ""
        return name if self._imports.is_module(name) else None


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
    if isinstance(function, ast.AsyncFunctionDef) or (isinstance(found, ast.ClassDef) and _is_async(found)):
        raise ValueError(f"test {test.name!r} is async: it cannot run apart from the repository")
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


def _is_async(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).endswith("IsolatedAsyncioTestCase") for base in node.bases)


def _has_base(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).rpartition(".")[2] == "TestCase" for base in node.bases)
