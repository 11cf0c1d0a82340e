"""What pages may name: the files, symbols, words, commands and `make` targets of the project, read from its
sources.

Python is read by `ast` and never imported, except for the command line and the config's schema, which say
themselves what they take.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import typer

from agentrl.cli.app import app
from agentrl.config.keys import iter_keys
from agentrl.registered import all_of

ROOT = Path(__file__).parents[2]
PACKAGE = ("agentrl", "agents", "tools", "interactions", "configs")
"""Folders of the package; the last four are modules of it by the names agentrl.agents, and so on."""
FOLDERS = (*PACKAGE, "examples", "benchmarks", "docs", "tests")
TEXTS = (".yaml", ".sh", ".jinja", ".txt", ".toml")
WORD = re.compile(r"[A-Za-z_]\w*")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Definition:
    """A module, class, function or variable. parameters: what a call may name; required: what it must;
    is_open: it takes any other, too.
    """

    members: Mapping[str, Definition] = field(default_factory=dict)
    parameters: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    is_open: bool = False
    bases: tuple[str, ...] = ()


VALUE = Definition(is_open=True)
IMPORTED = Definition(is_open=True)


@dataclass(frozen=True)
class Project:
    """All names of the project.

    words: identifiers of the package, and words of its strings and data files; docstrings and comments define
    nothing.
    strings: those strings and data files, one behind the other.
    pieces: what stands beside a value in f-strings, such as `_s` of f"{phase}_s": with a word it makes
    another.
    """

    root: Path
    files: frozenset[str]
    modules: Mapping[str, Definition]
    words: frozenset[str]
    strings: str
    pieces: frozenset[str]

    @cached_property
    def folders(self) -> frozenset[str]:
        return frozenset(str(parent) for file in self.files for parent in Path(file).parents)

    @cached_property
    def by_name(self) -> dict[str, list[Definition]]:
        """Return the package's definitions of a name, in modules and in classes."""
        found: dict[str, list[Definition]] = {}

        def collect(definition: Definition) -> None:
            for name, member in definition.members.items():
                found.setdefault(name, []).append(member)
                collect(member)

        for name, module in self.modules.items():
            if name.startswith("agentrl"):
                collect(module)
        return found

    @cached_property
    def in_tests(self) -> frozenset[str]:
        """Return the classes and functions of the tests."""
        return frozenset(
            name
            for path, module in self.modules.items()
            if path.startswith("tests.")
            for name in module.members
        )

    @cached_property
    def targets(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the targets and the variables of the Makefile."""
        text = (self.root / "Makefile").read_text()
        return frozenset(re.findall(r"^([a-z][\w-]*):", text, re.M)), frozenset(
            re.findall(r"\$\((\w+)\)", text)
        )

    @cached_property
    def command(self) -> Any:
        """Return the command line as click's group of commands; typer has a click of its own, in a private
        module.
        """
        return typer.main.get_command(app)

    @cached_property
    def keys(self) -> frozenset[str]:
        return frozenset(
            ".".join(key) for schema in all_of("agentrl.configs") for key, _ in iter_keys(schema)
        )

    def has_word(self, word: str) -> bool:
        """Tell whether the package has the word, or makes it of one of its words and a piece of an
        f-string.
        """
        ends = ((word.removesuffix(piece), word.removeprefix(piece)) for piece in self.pieces)
        return word in self.words or any(
            part != word and part in self.words for parts in ends for part in parts
        )

    def has_file(self, path: str) -> bool:
        """Tell whether a file or folder is named by `path`: from the root where it begins with a folder
        there, else by its end.
        """
        path = path.rstrip("/").removeprefix("./")
        pattern = re.compile(re.escape(path).replace(r"\*", "[^/]*"))
        if path.partition("/")[0] in FOLDERS:
            return any(pattern.fullmatch(name) for name in (*self.files, *self.folders))
        return any(
            pattern.fullmatch(name.rpartition("/")[2] if "/" not in path else name)
            for name in self._ends(path.count("/") + 1)
        )

    def _ends(self, length: int) -> Iterator[str]:
        for name in (*self.files, *self.folders):
            yield "/".join(name.split("/")[-length:])

    def is_written(self, name: str) -> bool:
        """Tell whether the package has a string with this file's name: runs write such files.

        Digits stand for any number.
        """
        head, *tail = re.split(r"\d+", name)
        return name in self.strings or (
            bool(head and tail) and head in self.strings and f".{tail[-1].rpartition('.')[2]}" in self.strings
        )

    def classes(self, name: str) -> list[Definition]:
        """Return the classes of that name with all that they inherit."""
        return [
            c
            for own in self.by_name.get(name, [])
            for c in (own, *(c for base in own.bases for c in self.classes(base)))
        ]

    def has_member(self, owner: str, name: str) -> bool:
        return any(name in c.members for c in self.classes(owner))

    def accepts(self, name: str, keyword: str, owner: str | None = None) -> bool:
        """Tell whether a call of `name` (a function, a class, or a member of `owner`) may name this
        argument.
        """
        found = self.functions(name, owner)
        return not found or any(keyword in one.parameters or one.is_open for one in found)

    def functions(self, name: str, owner: str | None = None) -> list[Definition]:
        """Return what a call of `name` may mean, as far as its parameters are known."""
        found = (
            self.classes(name)
            if owner is None
            else [c.members[name] for c in self.classes(owner) if name in c.members]
        )
        return [one for one in found if one is not IMPORTED and one is not VALUE]

    def has_dotted(self, name: str) -> bool:
        """Tell whether a full name, agentrl.package.module.Class.member, exists."""
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            module = self.modules.get(".".join(parts[:length]))
            if module is not None:
                rest = parts[length:]
                if len(rest) == 2:
                    return rest[0] in module.members and self.has_member(rest[0], rest[1])
                return not rest or (len(rest) == 1 and rest[0] in module.members)
        return False


ADDRESSES = ("testing", "testing.contracts")
"""Extras whose public address is that of a module of the core."""


def read_project(root: Path = ROOT) -> Project:
    """Read the sources of a project: a second or two."""
    files, modules, strings, words, pieces = set(), {}, [], set(), set()
    for path in _sources(root):
        name = path.relative_to(root).as_posix()
        files.add(name)
        is_package = name.partition("/")[0] in (*PACKAGE, "pyproject.toml", "constraints.txt", "examples")
        if path.suffix == ".py":
            tree = ast.parse(path.read_text(encoding="utf-8"), filename=name)
            modules[_module_name(name)] = _define_all(tree)
            if is_package:
                words |= _identifiers(tree)
                strings += _strings(tree)
                pieces |= _pieces(tree)
        elif path.suffix in TEXTS and is_package:
            strings.append(path.read_text(encoding="utf-8"))
    extras = {room: modules.get(f"agentrl.extras.{room}") for room in ADDRESSES}
    modules |= {f"agentrl.{room}": names for room, names in extras.items() if names is not None}
    words |= {Path(file).stem for file in files if file.endswith(".jinja")}  # templates are chosen by name
    words |= {word for text in strings for word in WORD.findall(text)}
    return Project(root, frozenset(files), modules, frozenset(words), "\n".join(strings), frozenset(pieces))


def _sources(root: Path) -> Iterator[Path]:
    yield from (path for path in root.iterdir() if path.is_file())
    yield from (path for path in (root / ".ci").rglob("*") if path.is_file())
    for folder in FOLDERS:
        yield from (
            path for path in (root / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts
        )


def _module_name(path: str) -> str:
    parts = Path(path).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] not in PACKAGE[1:] else ("agentrl", *parts))


def _define_all(node: ast.Module | ast.ClassDef) -> Definition:
    """Return what stands in a module or class; of a class also what its methods write into `self`."""
    members: dict[str, Definition] = {}
    fields = set()
    for child in _statements(node):
        if isinstance(child, Function):
            members[child.name] = _define_function(child)
        elif isinstance(child, ast.ClassDef):
            members[child.name] = _define_all(child)
        elif isinstance(child, ast.ImportFrom | ast.Import):
            members |= {(alias.asname or alias.name).partition(".")[0]: IMPORTED for alias in child.names}
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            names = {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
            members |= dict.fromkeys(names, VALUE)
            fields |= names
    if isinstance(node, ast.Module):
        return Definition(members)
    written = {
        n.attr
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self" and isinstance(n.ctx, ast.Store)
    }
    init = members.get("__init__", Definition())
    members = dict.fromkeys(written, VALUE) | members
    bases = tuple(
        WORD.findall(ast.unparse(base))[-1 if "[" not in ast.unparse(base) else 0] for base in node.bases
    )
    return Definition(members, init.parameters | fields, init.required, init.is_open, bases)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a body, also those under `if`, `try` and `with`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If | ast.Try | ast.With):
            yield from _statements(child)
        else:
            yield child


def _define_function(node: Function) -> Definition:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = {a.arg for a in positional[: len(positional) - len(arguments.defaults)]}
    required |= {
        a.arg
        for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    }
    names = {
        a.arg
        for a in (*positional, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
        if a is not None
    }
    return Definition(
        {}, frozenset(names), frozenset(required - {"self", "cls"}), arguments.kwarg is not None
    )


def _identifiers(tree: ast.Module) -> set[str]:
    values = (getattr(node, name, None) for node in ast.walk(tree) for name in ("id", "attr", "arg", "name"))
    return {word for value in values if isinstance(value, str) for word in value.split(".")}


def _strings(tree: ast.Module) -> list[str]:
    """Return all strings but docstrings."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (
        node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in documentation
    )
    return [node.value for node in constants if isinstance(node.value, str)]


def _pieces(tree: ast.Module) -> set[str]:
    joined = (value for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in node.values)
    texts = (value.value for value in joined if isinstance(value, ast.Constant))
    return {piece for text in texts for piece in re.findall(r"^_\w+|\w+_$", text)}
