"""Tests written in Python: parsed to calls with expected values where possible, else to a suite of test
code.
"""

from __future__ import annotations

import ast
import builtins
import functools
import symtable
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

PROGRAM_MODULES = ("solution", "program", "main", "__main__", "your_module", "candidate")
"""Modules from which tests import the program's names."""
PACKAGES = ("np", "numpy", "pd", "pandas")
ASSERTING = "_asserting"
_BUILTIN = frozenset(dir(builtins)) | {"__name__", "__file__", "__doc__"}


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of one of the program's functions, and its expected value."""

    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    expected: Any


@dataclass(frozen=True, slots=True)
class CheckedCase:
    """One piece of test code. functions, classes: pytest functions and unittest classes to call after it."""

    source: str
    functions: tuple[str, ...]
    classes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Suite:
    """Pieces of test code that run in a process beside the program's.

    names: those taken from the program.
    modules: those used without an import.
    sources: classes that the tests define and whose objects the program receives; they are defined in the
        program's process.
    asserting: the name of the context manager that marks assertions in the sources.
    """

    names: tuple[str, ...]
    modules: tuple[str, ...]
    sources: tuple[str, ...]
    cases: tuple[CheckedCase, ...]
    asserting: str = ASSERTING


def read_call(text: str) -> FunctionCall | None:
    """Parse `assert f(1, [2]) == {3}`: a call with literal arguments, compared with a literal.

    None for all else.
    """
    match _parse(text).body:
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
            call, expected = (left, right) if isinstance(left, ast.Call) else (right, left)
        case _:
            return None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id in _BUILTIN:
        return None
    try:
        args = tuple(ast.literal_eval(arg) for arg in call.args)
        kwargs = {
            keyword.arg: ast.literal_eval(keyword.value)
            for keyword in call.keywords
            if keyword.arg is not None
        }
        value = ast.literal_eval(expected)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return None
    return FunctionCall(call.func.id, args, kwargs, value) if len(kwargs) == len(call.keywords) else None


@functools.lru_cache(maxsize=256)  # all attempts of a group have the same tests
def read_tests(texts: tuple[str, ...]) -> tuple[FunctionCall, ...] | Suite:
    """Parse pieces of test code: to calls if all are such, else to a suite.

    Raises ValueError as `read_suite`.
    """
    calls = tuple(call for text in texts if (call := read_call(text)) is not None)
    return calls if len(calls) == len(texts) else read_suite(texts)


@functools.lru_cache(maxsize=256)
def join_setups(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Prepend pieces that run nothing (imports and data) to the next piece that does. Raises ValueError."""
    joined, waiting = [], ""
    for place, text in enumerate(texts, start=1):
        is_last = place == len(texts)
        if _runs_nothing(_parse(text)) and not is_last:
            waiting += f"{text}\n"
        else:
            joined.append(waiting + text)
            waiting = ""
    return tuple(joined)


def read_suite(texts: Sequence[str]) -> Suite:
    """Prepare pieces of test code; each sees the definitions of the earlier ones.

    Raises:
        ValueError: a piece is not valid Python, or runs nothing.
    """
    names: dict[str, None] = {}
    modules: dict[str, None] = {}
    sources: dict[str, None] = {}
    bound: set[str] = set()
    cases = []
    for text in texts:
        tree = _parse(text)
        taken = _take_imports(tree)
        classes = _take_classes(tree)
        functions, test_cases = _uncalled(tree, text)
        free, own = _names(ast.unparse(tree))
        used = set(_modules(tree, free))
        # Names bound by a test are its own.
        needed = [
            *(name for name in free if name not in used | bound),
            *taken,
            *classes,
        ]
        names.update(
            dict.fromkeys([*needed, *_hidden_entry(tree, is_alone=not needed and bound.isdisjoint(free))])
        )
        bound |= own
        modules.update(dict.fromkeys(sorted(used)))
        if classes:
            sources.update(dict.fromkeys(_imports(tree)))
            sources.update(dict.fromkeys(classes.values()))
        _MarkAsserts().visit(tree)
        cases.append(CheckedCase(ast.unparse(ast.fix_missing_locations(tree)), functions, test_cases))
    return Suite(tuple(names), tuple(modules), tuple(sources), tuple(cases))


def _parse(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"a test is not valid Python ({error}): {text[:80]!r}") from error


class _MarkAsserts(ast.NodeTransformer):
    """Wraps assertions (`assert`, and calls like `self.assertEqual(...)`) in `with _asserting:`."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return self._mark(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        function = node.value.func if isinstance(node.value, ast.Call) else None
        name = (
            function.attr
            if isinstance(function, ast.Attribute)
            else function.id
            if isinstance(function, ast.Name)
            else ""
        )
        return self._mark(node) if name.startswith("assert") else node

    def _mark(self, node: ast.stmt) -> ast.AST:
        return ast.With(items=[ast.withitem(context_expr=ast.Name(ASSERTING, ast.Load()))], body=[node])


def _take_imports(tree: ast.Module) -> list[str]:
    """Remove `from solution import f` and return the names. `import solution` stays and will fail."""
    found = []
    for node in list(tree.body):
        if isinstance(node, ast.ImportFrom) and node.module in PROGRAM_MODULES:
            tree.body.remove(node)
            found += [alias.name for alias in node.names if alias.name != "*"]
            renamed = [f"{alias.asname} = {alias.name}" for alias in node.names if alias.asname]
            place = _after_future(tree)
            tree.body[place:place] = ast.parse("\n".join(renamed)).body
    return found


def _after_future(tree: ast.Module) -> int:
    """Return the first place where code may stand: behind imports from `__future__`."""
    futures = [
        place
        for place, node in enumerate(tree.body, start=1)
        if isinstance(node, ast.ImportFrom) and node.module == "__future__"
    ]
    return max(futures, default=0)


def _take_classes(tree: ast.Module) -> dict[str, str]:
    """Remove the classes whose objects the program may receive, and return {name: source}.

    Test classes stay.
    """
    found = {}
    for node in list(tree.body):
        if isinstance(node, ast.ClassDef) and node.name[:1].isupper() and not _is_test_class(node):
            tree.body.remove(node)
            found[node.name] = ast.unparse(node)
    return found


def _is_test_class(node: ast.ClassDef) -> bool:
    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    return (
        node.name.startswith("Test")
        or "TestCase" in bases
        or any(isinstance(inner, ast.Assert) for inner in ast.walk(node))
    )


def _imports(tree: ast.Module) -> Iterator[str]:
    return (ast.unparse(node) for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)))


def _uncalled(tree: ast.Module, text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the test functions and test classes that only a test runner would call.

    Raises:
        ValueError: nothing runs, or a function needs pytest.
    """
    if _acts(tree):
        return (), ()
    functions, classes = _left_to_a_runner(tree)
    free = [
        node
        for node in functions
        if len(node.args.args) <= len(node.args.defaults) and not node.decorator_list
    ]
    if len(free) < len(functions):
        raise ValueError(
            f"function {next(node.name for node in functions if node not in free)} of a test needs pytest: "
            f"{text[:80]!r}"
        )
    if not functions and not classes:
        raise ValueError(
            "a test runs nothing: it only defines names and calls nothing (`entry_point` calls `check`): "
            f"{text[:80]!r}"
        )
    return tuple(node.name for node in functions), tuple(classes)


def _runs_nothing(tree: ast.Module) -> bool:
    return not _acts(tree) and not any(_left_to_a_runner(tree))


def _acts(tree: ast.Module) -> bool:
    silent = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
    return any(not isinstance(node, silent) and not _is_text(node) for node in tree.body)


def _left_to_a_runner(tree: ast.Module) -> tuple[list[ast.FunctionDef], list[str]]:
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and _is_test_class(node)]
    return _tests_of(tree.body), [node.name for node in classes if node.bases or _tests_of(node.body)]


def _tests_of(body: list[ast.stmt]) -> list[ast.FunctionDef]:
    return [node for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test")]


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _names(text: str) -> tuple[list[str], set[str]]:
    """Return the free names of a text, without builtins, and the names that it binds."""
    top = symtable.symtable(text, "test", "exec")
    bound: set[str] = set()
    free: dict[str, None] = {}
    waiting = [top]
    while waiting:
        table = waiting.pop()
        waiting += table.get_children()
        for symbol in table.get_symbols():
            if table is top or symbol.is_global():
                if symbol.is_assigned() or symbol.is_imported():
                    bound.add(symbol.get_name())
                elif symbol.is_referenced():
                    free[symbol.get_name()] = None
    return [name for name in free if name not in bound and name not in _BUILTIN], bound


def _modules(tree: ast.Module, free: list[str]) -> list[str]:
    """Return the modules that a text uses without an import (`math.isclose`).

    They are not the program's names.
    """
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    alone = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in bare}
    return [
        name for name in free if name not in alone and (name in sys.stdlib_module_names or name in PACKAGES)
    ]


def _hidden_entry(tree: ast.Module, *, is_alone: bool) -> list[str]:
    """Return the name of the program's function if it shadows a builtin, like `sum`.

    It is the argument of `check`. If `is_alone`, the test takes no other name from the program; then it is
    the first function that an assertion calls.
    """
    for node in tree.body:
        match node:
            case ast.Expr(value=ast.Call(func=ast.Name(id="check"), args=[ast.Name(id=name)])) if (
                name in _BUILTIN
            ):
                return [name]
    for statement in ast.walk(tree) if is_alone else ():
        if isinstance(statement, ast.Assert):
            for inner in ast.walk(statement.test):
                if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name):
                    return [inner.func.id]
    return []
