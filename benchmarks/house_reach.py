"""Which functions of the program a function reaches, followed by names as a reader would: calls of functions
and classes by the names that a module defines or imports, and of methods by `self`, by a typed argument or
attribute, or by the one class of the program that has such a method.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Reach:
    """trees: module -> its syntax tree."""

    def __init__(self, trees: Mapping[str, ast.Module]) -> None:
        self._bodies: dict[str, ast.AST] = {}
        self._imported: dict[str, dict[str, str]] = {}
        self._methods: defaultdict[str, list[str]] = defaultdict(list)
        for module, tree in trees.items():
            self._imported[module] = dict(_imports(tree))
            for node in tree.body:
                if isinstance(node, FUNCTIONS):
                    self._bodies[f"{module}.{node.name}"] = node
                elif isinstance(node, ast.ClassDef):
                    self._bodies[f"{module}.{node.name}"] = ast.Pass()
                    for method in node.body:
                        if isinstance(method, FUNCTIONS):
                            name = f"{module}.{node.name}.{method.name}"
                            self._bodies[name] = method
                            self._methods[method.name].append(name)
        self._modules = trees.keys()

    def from_function(self, start: str) -> set[str]:
        """Return the functions and methods that `start` reaches, itself included."""
        found: set[str] = set()
        todo = [start]
        while todo:
            name = todo.pop()
            if name not in found and name in self._bodies:
                found.add(name)
                todo += self._called(name)
        return {name for name in found if not isinstance(self._bodies[name], ast.Pass)}

    def module_of(self, function: str) -> str:
        while function not in self._modules:
            function = function.rpartition(".")[0]
        return function

    def _called(self, name: str) -> Iterator[str]:
        module = self.module_of(name)
        owner = name.rpartition(".")[0]
        for node in ast.walk(self._bodies[name]):
            if isinstance(node, ast.Call):
                yield from self._targets(node.func, module, owner)
        if isinstance(self._bodies[name], ast.Pass):  # a class: making an instance runs these
            yield from (f"{name}.{method}" for method in ("__init__", "__post_init__", "__enter__"))

    def _targets(self, called: ast.expr, module: str, owner: str) -> Iterator[str]:
        if isinstance(called, ast.Name):
            yield self._imported[module].get(called.id, f"{module}.{called.id}")
        elif isinstance(called, ast.Attribute):
            if isinstance(called.value, ast.Name):
                base = called.value.id
                if base == "self":
                    yield f"{owner}.{called.attr}"
                    return
                place = self._imported[module].get(base, f"{module}.{base}")
                if f"{place}.{called.attr}" in self._bodies:
                    yield f"{place}.{called.attr}"
                    return
            if len(owners := self._methods[called.attr]) == 1:
                yield owners[0]


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name, alias.name) for alias in node.names)
