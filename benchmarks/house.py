"""Size and coupling of the code base, counted from the sources alone, in seconds.

A module is a one-importer if it is no package and exactly one other module of the program imports it. A
method forwards if it only calls a method of one of its attributes with its own arguments. A circle is a set
of modules that import each other, imports within functions included. Statements, unlike lines, do not depend
on the width of lines.

Usage: python benchmarks/house.py [--out docs/results/house.json]
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from house_reach import Reach
from machine import ROOT, write_result

PLUGINS = ("agents", "tools", "interactions")
"""Folders at the root that are packages of `agentrl`."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SHORT_LINES = 60
TAKE_THE_WHOLE = {"agentrl.controller.train", "agentrl.controller.run", "agentrl.controller.start"}
"""Modules, besides those of `agentrl.config`, that may take the whole config."""


@dataclass(frozen=True)
class Module:
    name: str
    tree: ast.Module
    num_lines: int
    num_code_lines: int

    @property
    def package(self) -> str:
        return self.name.rpartition(".")[0]


def read_modules(root: Path = ROOT) -> dict[str, Module]:
    """Return every module of the program by its name."""
    folders = [("agentrl", "agentrl"), *((name, f"agentrl.{name}") for name in PLUGINS)]
    found = {}
    for folder, package in folders:
        for path in sorted((root / folder).rglob("*.py")):
            parts = [*package.split("."), *path.relative_to(root / folder).with_suffix("").parts]
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = path.read_text()
            tree = ast.parse(text)
            found[name] = Module(name, tree, text.count("\n"), count_code(text, tree))
    return found


def count_code(text: str, tree: ast.Module) -> int:
    """Return the number of lines with code, without blank lines, comments and docstrings."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (
            tokenize.COMMENT,
            tokenize.NL,
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
            tokenize.ENDMARKER,
        ):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def imports_of(module: Module, modules: Mapping[str, Module]) -> set[str]:
    """Return the modules of the program that a module imports anywhere in its file."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            below = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (below & modules.keys()) or {node.module}
    return found & modules.keys() - {module.name}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the sets of two or more modules that reach each other (Tarjan 1972, strongly connected
    components).
    """
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        path.append(name)
        for other in graph[name]:
            if other not in order:
                visit(other)
            if other in path:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == order[name]:
            own = path[path.index(name) :]
            del path[path.index(name) :]
            if len(own) > 1:
                found.append(sorted(own))

    for name in graph:
        if name not in order:
            visit(name)
    return found


def classes(module: Module) -> Iterator[ast.ClassDef]:
    return (node for node in module.tree.body if isinstance(node, ast.ClassDef))


def functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (
        node for node in ast.walk(module.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def forwards(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a method only calls a method of one of its attributes with its own arguments."""
    body = [
        node
        for node in method.body
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr) or method.name.startswith("__"):
        return False
    call = body[0].value
    call = call.value if isinstance(call, ast.Await) else call
    if not (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Attribute)
    ):
        return False
    part = call.func.value.value
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    own = {argument.arg for argument in [*method.args.args, *method.args.kwonlyargs]}
    return (
        isinstance(part, ast.Name)
        and part.id == "self"
        and all(isinstance(value, ast.Name) and value.id in own for value in given)
    )


def takes_the_whole(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    arguments = [*function.args.args, *function.args.kwonlyargs]
    return any(
        isinstance(argument.annotation, ast.Name) and argument.annotation.id == "Config"
        for argument in arguments
    )


def room_of(module: str) -> str:
    """Return the room of a module: `agentrl.rollout.session` -> `rollout`, `extras.boxes` of an extra."""
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[0] == "extras" else 1]) if parts else ""


def is_extra(module: str) -> bool:
    return room_of(module).startswith("extras")


def rooms(modules: Mapping[str, Module]) -> dict[str, int]:
    """Return how large core and extras are, and what ties rooms to each other."""
    core = {name: module for name, module in modules.items() if not is_extra(name)}
    sizes = Counter(room_of(name) for name, module in core.items() if module.num_code_lines)
    arrows, between, across, upwards = set(), set(), set(), 0
    folders = {room_of(name) for name in modules if name.count(".") > 1}
    for name, module in modules.items():
        for imported, one in names_imported(module, modules):
            own, other = room_of(name), room_of(imported)
            if is_extra(name):
                continue
            if is_extra(imported):
                upwards += 1
            elif own and other and own != other:
                arrows.add((own, other))
                between |= {(own, other)} if {own, other} <= folders else set()
                across.add(one)
    reach = Reach({name: module.tree for name, module in core.items()})
    started = reach.from_function("agentrl.controller.start.open_run")
    learned = reach.from_function("agentrl.controller.train.learn")
    largest = max(len(methods_of(c)) for module in core.values() for c in classes(module))
    return {
        "core_lines_of_code": sum(module.num_code_lines for module in core.values()),
        "extras_lines_of_code": sum(m.num_code_lines for name, m in modules.items() if is_extra(name)),
        "core_modules": len(core),
        "modules_of_the_largest_room": max(sizes.values()),
        "arrows_between_rooms_of_the_core": len(between),
        "arrows_with_modules_that_stand_alone": len(arrows),
        "names_across_rooms_of_the_core": len(across),
        "names_of_the_core_in_extras": len(names_for_extras(modules)),
        "imports_of_extras_in_the_core": upwards,
        "protocols_with_one_implementation": len(lonely_protocols(modules)),
        "methods_of_the_largest_class": largest,
        "functions_reached_from_open_run": len(started),
        "files_reached_from_open_run": len({reach.module_of(one) for one in started}),
        "functions_reached_from_learn": len(learned),
        "files_reached_from_learn": len({reach.module_of(one) for one in learned}),
        "imports_of_start": len(imports_of(modules["agentrl.controller.start"], modules)),
        "lines_of_start": modules["agentrl.controller.start"].num_lines,
    }


def names_for_extras(modules: Mapping[str, Module]) -> set[str]:
    """Return the names of the core that extras import."""
    return {
        one
        for name, module in modules.items()
        if is_extra(name)
        for imported, one in names_imported(module, modules)
        if room_of(imported) and not is_extra(imported)
    }


def names_imported(module: Module, modules: Mapping[str, Module]) -> Iterator[tuple[str, str]]:
    """Yield (module, dotted name) of everything of the program that a module imports."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, alias.name) for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if (place := name if name in modules else node.module) in modules:
                    yield place, name


def methods_of(one: ast.ClassDef) -> set[str]:
    return {node.name for node in one.body if isinstance(node, FUNCTIONS)}


def lonely_protocols(modules: Mapping[str, Module]) -> list[str]:
    """Return the protocols of which one class has all methods, or none has."""
    found = [(m.name, c) for m in modules.values() for c in classes(m)]
    protocols = [(m, c) for m, c in found if any("Protocol" in ast.unparse(base) for base in c.bases)]
    others = [methods_of(c) for _, c in found if all("Protocol" not in ast.unparse(b) for b in c.bases)]
    return [
        f"{module}.{protocol.name}"
        for module, protocol in protocols
        if (asked := methods_of(protocol)) and sum(asked <= has for has in others) <= 1
    ]


def surfaces() -> dict[str, int]:
    """Return how much a user meets: keys, commands, pages."""
    from agentrl.cli.command import core_commands
    from agentrl.config.schema import Config

    pages = [path for path in (ROOT / "docs").glob("*.md") if path.name != "config.md"]
    return {
        "config_keys": num_keys(Config),
        "commands_of_the_core": len({one.path.split()[0] for one in core_commands()}),
        "pages": len(pages),
        "words_of_pages": sum(len(path.read_text().split()) for path in pages),
        "words_of_the_changelog": len((ROOT / "CHANGELOG.md").read_text().split()),
    }


def num_keys(section: Any) -> int:
    """Return the number of settings of a section, those of sections in it included."""
    inner = [field.annotation for field in section.model_fields.values()]
    return sum(num_keys(one) if hasattr(one, "model_fields") else 1 for one in inner)


def measure(modules: Mapping[str, Module]) -> dict[str, object]:
    """Return the counts; for those that should be small, the names."""
    graph = {name: imports_of(module, modules) for name, module in modules.items()}
    importers = Counter(imported for imports in graph.values() for imported in imports)
    packages = {module.package for module in modules.values()}
    alone = [name for name in modules if importers[name] == 1 and name not in packages]
    named: defaultdict[str, list[str]] = defaultdict(list)
    for module in modules.values():
        for found in classes(module):
            if not found.name.startswith("_"):
                named[found.name].append(module.name)
    methods = [
        (m, c, f) for m in modules.values() for c in classes(m) for f in c.body if isinstance(f, FUNCTIONS)
    ]
    plugins = tuple(f"agentrl.{name}" for name in (*PLUGINS, "rewards"))
    return {
        **rooms(modules),
        **surfaces(),
        "files": len(modules),
        "lines": sum(module.num_lines for module in modules.values()),
        "lines_of_code": sum(module.num_code_lines for module in modules.values()),
        "statements": sum(
            isinstance(node, ast.stmt) for module in modules.values() for node in ast.walk(module.tree)
        ),
        "one_importer_modules": len(alone),
        "one_importer_modules_below_60_lines": sorted(
            name for name in alone if modules[name].num_lines < SHORT_LINES
        ),
        "forwarding_methods": sorted(f"{m.name}.{c.name}.{f.name}" for m, c, f in methods if forwards(f)),
        "signatures_with_the_whole_config": sorted(
            f"{module.name}.{function.name}"
            for module in modules.values()
            if not module.name.startswith("agentrl.config") and module.name not in TAKE_THE_WHOLE
            for function in functions(module)
            if takes_the_whole(function)
        ),
        "public_class_names_twice": {
            name: places
            for name, places in sorted(named.items())
            if len([p for p in places if not p.startswith(plugins)]) > 1
        },
        "import_circles": circles(graph),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = measure(read_modules())
    for name, value in result.items():
        print(f"{name:40} {value if isinstance(value, int) else len(value)}")  # type: ignore[arg-type]
    write_result(arguments.out, result)


if __name__ == "__main__":
    main()
