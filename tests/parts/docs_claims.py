"""What a page claims that exists, and which of it does not: `complaints(page, text, project)`.

Read are code spans, links, and blocks of commands or Python. The rules, each with what it leaves out:

- links: the file exists, and the heading behind `#`; not other sites.
- paths: what ends like a source or a file of a run, or begins with a folder of ours, is a file (or folder) of
  the project, or a name that the package writes. `path/to/...`, `my_...`, and capitals (`CONFIG.yaml`) stand
  for the reader's own.
- `agentrl ...` and `make ...`: command, options, config file and keys; targets and variables.
- `agentrl.package.name`, `Class.member`, `session.member` (an object by the name of its class): defined
  there.
- `name(first, keyword=...)`: defined, and takes arguments of these names.
- `ClassName`: defined. `word`, `word.word`, `key: value`: identifiers or strings of the package have each of
  these words.
- In Python blocks: imports from agentrl; in architecture.md all signatures, and files that comments name. In
  pictures: files and members.

Never read: formulas and other spans that are none of these forms, single letters, columns of tables whose
head names `verl`.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from parts.docs_commands import all_commands, command, is_key, options
from parts.docs_names import FOLDERS, Project

BLOCK = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.M | re.S)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*?) *$", re.M)
PATH = re.compile(r"(?<![\w./<>$~:@{-])(\.?[\w*.-]+(?:/[\w*.<>-]+)*/?)(?![\w{])")
EXAMPLES = ("python", "yaml", "toml", "json")
SOURCES = (".py", ".md", ".yaml", ".toml", ".sh", ".jinja", ".txt")
SUFFIXES = (*SOURCES, ".json", ".jsonl", ".parquet", ".png", ".safetensors", ".html", ".gz", ".log")
THEIRS = re.compile(r"(.*/)?(my_[\w.*-]*|[A-Z][A-Z_]*(\.\w+)?)|path/.*|file\.py|.*[<>].*|(.*/)?\.+")
"""The reader's own file, a placeholder in capitals, `<name>`, `...`."""

DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_<][\w<>]*)+")
CALL = re.compile(r"(?:await |async def |def |return |@)?([A-Za-z_][\w.]*)\((.*)\)(?: -> .+)?")
SETTING = re.compile(r"([a-z_]\w*(?:\.[\w<>]+)*)(?:(?:: |=)(.*)|() = [\"\w.]+)")
METRIC = re.compile(r"[a-z_]+(/[a-z0-9_<>*.]+)+/?")
CAPITALISED = re.compile(r"[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*")
PLAIN = re.compile(r"(?!.*\d{6}|[a-z]_)\.?[a-z_][a-z0-9_]{3,}(_[A-Z])?(\.[a-z_]+)*")
VARIABLE = re.compile(r"[A-Z][A-Z0-9]*_[A-Z0-9_]+")
FOLDER = re.compile(r"[a-z_]+/")
SIGNATURE = re.compile(r"(\w+)\(((?:[^()]|\([^()]*\))*)\)")
_MEMBER = re.compile(r"\b[A-Z]\w+\.[a-z]\w*")
_WRAP = re.compile(r"(?<=[(,])\n\s+|\n\s*(?=\))")
"""Where a signature goes on in the next line."""
_BRACKETS = re.compile(r"\[[^\[\]]*\]")
KNOWN = frozenset({*dir(builtins), *typing.__all__})


class Complaint(NamedTuple):
    """What a page names, and why it does not exist."""

    name: str
    why: str


@dataclass(frozen=True)
class Page:
    """One page.

    `own`: names that its code blocks define or hold as strings, so that its text may speak of them.
    """

    path: str
    text: str

    @property
    def is_architecture(self) -> bool:
        """Whether its Python blocks are signatures of the package, and so claims; those of other pages are
        examples.
        """
        return self.path.endswith("architecture.md")

    @functools.cached_property
    def blocks(self) -> list[tuple[str, str]]:
        return BLOCK.findall(self.text)

    @functools.cached_property
    def prose(self) -> str:
        return _without_columns_of_verl(BLOCK.sub("", self.text))

    @functools.cached_property
    def spans(self) -> list[str]:
        return list(dict.fromkeys(span.replace("\\|", "|").strip() for span in SPAN.findall(self.prose)))

    @functools.cached_property
    def examples(self) -> str:
        return "\n".join(
            text for language, text in self.blocks if language in EXAMPLES and not self.is_architecture
        )

    @functools.cached_property
    def own(self) -> frozenset[str]:
        return frozenset(re.findall(r"\w+", self.examples))


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found: dict[str, int] = {}
    for heading in HEADING.findall(BLOCK.sub("", text)):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(
            " ", "-"
        )
        found[slug] = found.get(slug, -1) + 1
    return {f"{slug}-{i}" if i else slug for slug, count in found.items() for i in range(count + 1)}


def complaints(page: Page, project: Project) -> list[Complaint]:
    """Return what the page names and the project does not have."""
    found = [*_links(page, project)]
    for span in page.spans:
        found += [Complaint(span, why) for why in _span(span, page, project)]
    for language, text in page.blocks:
        if language in ("", "bash", "sh"):
            for line in _lines(text):
                found += [
                    Complaint(line, why)
                    for why in (*command(line, project), *_paths(line, project, only_ours=True))
                ]
        elif language == "mermaid":
            found += [
                Complaint(name, why) for name in _MEMBER.findall(text) for why in _dotted(name, page, project)
            ]
            found += [Complaint(line, why) for line in _lines(text) for why in _paths(line, project)]
        elif language == "python":
            found += _imports(text, project)
            if page.is_architecture:
                found += [*_signatures(text, project), *_comments(text, project)]
    return found


def _links(page: Page, project: Project) -> Iterator[Complaint]:
    folder = (project.root / page.path).parent
    for target in LINK.findall(SPAN.sub("``", page.prose)):
        name, _, anchor = target.partition("#")
        if "://" in target:
            continue
        if not (folder / name).exists():
            yield Complaint(target, "no such file")
        elif anchor and anchor not in anchors((folder / name).read_text() if name else page.text):
            yield Complaint(target, "no such heading")


def _span(span: str, page: Page, project: Project) -> Iterator[str]:
    """Yield what is wrong with one code span; the first form that it has decides."""
    if span.startswith(("agentrl ", "make ", "python ")):
        yield from command(span, project)
        yield from _paths(span, project, only_ours=True)
    elif re.match(r"--[a-z]", span):
        option = span.split()[0].partition("=")[0]
        if option not in project.strings and not any(
            option in options(c) for c in all_commands(project.command)
        ):
            yield f"no command has the option {option}"
    elif "::" in span:
        yield from _test(span, project)
    elif FOLDER.fullmatch(span):
        if not project.has_file(span):
            yield from _words(span, page, project)
    elif "/" in span or span.endswith(SUFFIXES):
        yield from (why for why in _paths(span, project) if why.removeprefix("no file ") not in page.examples)
        if METRIC.fullmatch(span) and not span.endswith(SUFFIXES) and not project.has_file(span):
            yield from _words(span.replace("/", " "), page, project)
    elif match := CALL.fullmatch(span):
        yield from _call(match[1], match[2], page, project)
    elif DOTTED.fullmatch(span):
        yield from _dotted(span, page, project)
    elif match := SETTING.fullmatch(span):
        yield from _words(match[1], page, project)
        if (
            match[2]
            and PLAIN.fullmatch(match[2])
            and not project.has_file(f"configs/{match[1]}/{match[2]}.yaml")
        ):
            yield from _words(match[2], page, project)
    elif VARIABLE.fullmatch(span) and span not in project.words:
        yield "no such environment variable"
    elif CAPITALISED.fullmatch(span) and not (
        project.by_name.keys() | project.in_tests | page.own | KNOWN
    ) & {span}:
        yield "no such class"
    elif all(map(PLAIN.fullmatch, span.split())) and span not in project.in_tests:
        yield from _words(span, page, project)


def _words(text: str, page: Page, project: Project) -> Iterator[str]:
    for word in re.findall(r"<[^>]*>|[A-Za-z_]\w*", text):
        if not word.startswith("<") and word not in page.own | KNOWN and not project.has_word(word):
            yield f"the package has no {word}"


def _test(span: str, project: Project) -> Iterator[str]:
    file, _, name = span.partition("::")
    files = [path for path in project.files if f"/{path}".endswith(f"/{file}")]
    if not files:
        yield f"no file {file}"
    elif not any(
        re.search(rf"\b(def|class) {re.escape(name)}\b", (project.root / path).read_text()) for path in files
    ):
        yield f"{file} has no {name}"


def _paths(text: str, project: Project, *, only_ours: bool = False) -> Iterator[str]:
    """only_ours: read only what begins with a folder of the project; commands name files of readers, too."""
    for path in PATH.findall(text):
        path = re.sub(r"[A-Z]{3,}(?=\.)", "*", path.rstrip("."))  # run_NAME.sh
        is_ours = path.partition("/")[0] in (*FOLDERS, ".ci") and "/" in path
        if THEIRS.fullmatch(path.rstrip("/")) or not (is_ours or (not only_ours and path.endswith(SUFFIXES))):
            continue
        if not project.has_file(path) and (is_ours or not project.is_written(Path(path).name)):
            yield f"no file {path}"


def _call(name: str, arguments: str, page: Page, project: Project) -> Iterator[str]:
    owner, _, method = name.rpartition(".")
    known = project.by_name.keys() | page.own | KNOWN
    if owner:
        yield from _dotted(name, page, project)
    elif len(name) > 2 and name not in known:
        yield f"nothing defines {name}"
    class_name = owner if owner in project.by_name else None
    if not owner or class_name:
        for argument in re.findall(
            r"(?:^|,)\s*\**([a-z]\w+)(?==|\s*,|\s*$)",
            re.sub(r"\{[^{}]*\}|\([^()]*\)|\"[^\"]*\"", "", arguments),
        ):
            if not project.accepts(method, argument, class_name):
                yield f"{name} takes no {argument}"


def _dotted(name: str, page: Page, project: Project) -> Iterator[str]:
    """A full name; a class or an object by its name, and a member; otherwise each part is a word of the
    package.
    """
    first, second = name.split(".")[:2]
    if first == "agentrl":
        if (
            not project.has_dotted(name) and f"\n{name}\n" not in project.strings
        ):  # a group of entry points is a string
            yield "no such name"
    elif second in page.own or first == "verl":
        return
    elif first != "self" and not is_key(name, project) and (owners := _owners(first, project)):
        if not any(project.has_member(owner, second) for owner in owners):
            yield f"{', '.join(owners)}: no {second}"
    else:
        yield from _words(name, page, project)


def _owners(name: str, project: Project) -> list[str]:
    """Return the class of that name, or the classes that an object of that name may have: `session` is a
    Session or a TrajectorySession.
    """
    if name[0].isupper() or name.capitalize() not in project.by_name:
        return [name] if name in project.by_name and name[0].isupper() else []
    return [
        owner
        for owner in project.by_name
        if owner.startswith(name.capitalize()) or owner.endswith(name.capitalize())
    ]


def _imports(text: str, project: Project) -> Iterator[Complaint]:
    for module, names in re.findall(r"^\s*from (agentrl[\w.]*) import ([\w, ]+)", text, re.M):
        for name in re.findall(r"(\w+)(?: as \w+)?", names):
            if not project.has_dotted(f"{module}.{name}") and f"{module}.{name}" not in project.modules:
                yield Complaint(f"from {module} import {name}", "no such name")


def _signatures(text: str, project: Project) -> Iterator[Complaint]:
    """Yield what is wrong with stubs: `class X: f(a); g(b)`, `    def f(self, a) -> T; g(self)`, `def
    f(a)`.
    """
    owner = None
    for line in _WRAP.sub(" ", text).splitlines():
        code = re.sub(r"`.*`", "", re.split(r"(?:^|\s+)# ", line)[0])
        if code.startswith("class "):
            *_, owner = names = re.findall(r"class (\w+)", code)
            code = code.partition(":")[2]
            yield from (
                Complaint(f"class {name}", "nothing defines it")
                for name in names
                if name not in project.by_name
            )
        elif code and not code.startswith((" ", ")")):
            owner = None
        for name, arguments in SIGNATURE.findall(code):
            if name[0].isupper() or (owner is None and not re.search(rf"def {name}\(", code)):
                continue
            if owner is not None and not project.has_member(owner, name):
                yield Complaint(line.strip(), f"{owner} has no {name}")
            elif owner is None and name not in project.by_name:
                yield Complaint(line.strip(), f"nothing defines {name}")
            given = set(
                re.findall(r"(?:^|,)\s*\**(\w+)", _BRACKETS.sub("", _BRACKETS.sub("", arguments)))
            ) - {"self", "cls"}
            for argument in sorted(given):
                if not project.accepts(name, argument, owner):
                    yield Complaint(line.strip(), f"{name} takes no {argument}")
            missing = [one.required - given for one in project.functions(name, owner)]
            if missing and all(missing) and "..." not in arguments:
                yield Complaint(line.strip(), f"{name} needs {', '.join(sorted(missing[0]))}")


def _comments(text: str, project: Project) -> Iterator[Complaint]:
    for comment in re.findall(r"# (.*)", text):
        yield from (Complaint(comment, why) for why in _paths(comment, project))


def _lines(text: str) -> list[str]:
    return [line.strip().removeprefix("$ ") for line in text.replace("\\\n", " ").splitlines()]


def _without_columns_of_verl(text: str) -> str:
    """Drop the cells of tables that stand under a head which names `verl`: they name what verl has."""
    kept, theirs = [], frozenset[int]()
    lines = text.splitlines()
    for line, below in itertools.zip_longest(lines, lines[1:], fillvalue=""):
        cells = re.split(r"(?<!\\)\|", line) if line.startswith("|") else []
        if re.match(r"\|[\s:|-]+$", below) and cells:
            theirs = frozenset(i for i, cell in enumerate(cells) if re.search(r"\bverl\b", cell))
        kept.append("|".join(cell for i, cell in enumerate(cells) if i not in theirs) if cells else line)
    return "\n".join(kept)
