"""Follow a shell script without running anything, to find out which programs it would start.

Variables, arrays, arguments, conditions and loops are evaluated. Programs are not run; each is assumed to
succeed. A value that depends on a program's output is marked as unknown, and so is everything built from it.
"""

from __future__ import annotations

import fnmatch
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.extras.verl.importing.shell_expansion import (
    UNKNOWN,
    Unset,
    calculate,
    expand_parameter,
    is_true,
    shown,
    unknown,
)
from agentrl.extras.verl.importing.shell_syntax import (
    Assignment,
    CaseCommand,
    Chain,
    Command,
    CommandGroup,
    For,
    FunctionDefinition,
    If,
    Simple,
    Test,
    While,
    Word,
    WordPart,
    parse,
)

MAX_LOOPS = 100
MAX_COMMANDS = 20_000
MAX_WORK = 10_000_000
"""Characters that all expansions of a script may handle."""
MAX_DEPTH = 20


class _Left(Exception):
    """Control flow leaves a loop, a function or the script. `what`: break, continue, return or exit."""

    def __init__(self, what: str) -> None:
        self.what = what


@dataclass
class Shell:
    """The state of a script.

    Attributes:
        arguments: the script's own arguments.
        file: the script's path.
        folder: the working directory, which `cd` changes.
        variables: a list is an array.
        started: (line, words) of each program started so far.
        notes: what could not be followed, in words.
        depth: nesting of subshells, functions and sourced files.
    """

    arguments: list[str]
    file: Path
    folder: Path = field(default_factory=Path.cwd)
    variables: dict[str, str | list[str]] = field(default_factory=dict)
    functions: dict[str, Command] = field(default_factory=dict)
    started: list[tuple[int, list[str]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    depth: int = 0
    budget: list[int] = field(default_factory=lambda: [MAX_COMMANDS, MAX_WORK])
    """Remaining commands to follow, and characters to handle; shared with subshells."""

    def run(self, text: str) -> None:
        """Follow a script from its first command to its end.

        Raises:
            ConfigError: the script cannot be parsed, or commands are nested too deeply.
        """
        with suppress(_Left):
            self._chain(parse(text))

    def spend(self, num_characters: int) -> None:
        """Take the work on so many characters from the budget; raise ConfigError when it is used up."""
        self.budget[1] -= num_characters
        if self.budget[1] < 0:
            raise ConfigError(f"its values expand to more than {MAX_WORK:,} characters")

    # ----------------------------------------------------------------------------------------------- commands

    def _chain(self, chain: Chain) -> bool:
        status = True
        for before, is_inverted, command in chain.parts:
            if (before == "&&" and not status) or (before == "||" and status):
                continue
            status = self._command(command) != is_inverted
        return status

    def _command(self, command: Command) -> bool:
        self.budget[0] -= 1
        if self.budget[0] < 0:  # a loop that watches something forever, for instance
            self.notes.append(f"the script has more than {MAX_COMMANDS} commands and was not read to its end")
            raise _Left("exit")
        match command:
            case Simple():
                return self._simple(command)
            case If():
                taken = next(
                    (body for condition, body in command.branches if self._chain(condition)),
                    command.otherwise,
                )
                return True if taken is None else self._chain(taken)
            case For():
                items = self.arguments if command.words is None else self.fields(command.words)
                return self._loop(command.body, ({command.name: item} for item in list(items)))
            case While():
                passes: Iterator[Mapping[str, str]] = (
                    {} for _ in range(MAX_LOOPS) if self._chain(command.condition) != command.is_until
                )
                return self._loop(command.body, passes)
            case CaseCommand():
                return self._case(command)
            case CommandGroup():
                return (
                    self._chain(command.body) if not command.is_apart else self._apart().follow(command.body)
                )
            case FunctionDefinition():
                self.functions[command.name] = command.body
                return True
            case Test():
                return self._test(command)

    def follow(self, chain: Chain) -> bool:
        """Run a chain; an `exit` in it ends only this shell."""
        with suppress(_Left):
            return self._chain(chain)
        return True

    def _apart(self) -> Shell:
        """Return a subshell with a copy of the variables. Started programs and notes go to the same lists."""
        copy = {
            name: list(value) if isinstance(value, list) else value for name, value in self.variables.items()
        }
        self.spend(sum(len(value) for value in copy.values() if isinstance(value, list)))
        inner = Shell(
            list(self.arguments),
            self.file,
            self.folder,
            copy,
            dict(self.functions),
            self.started,
            self.notes,
            self.depth + 1,
        )
        inner.budget = self.budget
        if inner.depth > MAX_DEPTH:
            raise ConfigError(f"{self.file}: commands are nested more than {MAX_DEPTH} deep")
        return inner

    def _loop(self, body: Chain, passes: Iterator[Mapping[str, str]]) -> bool:
        for variables in passes:
            self.variables |= variables
            try:
                self._chain(body)
            except _Left as left:
                if left.what == "break":
                    break
                if left.what != "continue":
                    raise
        return True

    def _case(self, command: CaseCommand) -> bool:
        value = self.text(command.word)
        for patterns, body in command.branches:
            if any(fnmatch.fnmatchcase(shown(value), self.text(pattern)) for pattern in patterns):
                return self._chain(body)
        return True

    def _test(self, command: Test) -> bool:
        if command.arithmetic is not None:
            value = calculate(command.arithmetic, self)
            return value not in ("0", "")
        return is_true([self.text(word) for word in command.words])

    def _simple(self, command: Simple) -> bool:
        before = dict(self.variables) if command.assignments else {}
        for assignment in command.assignments:
            self._assign(assignment)
        words = self.fields(command.words)
        if not words:
            return True
        status = self._builtin(words, command.line)
        if words[0] not in ("export", "declare", "local", "readonly", "typeset", ":"):
            for assignment in command.assignments:  # `A=1 program` sets A only for the program
                self.variables.pop(assignment.name, None)
                if assignment.name in before:
                    self.variables[assignment.name] = before[assignment.name]
        return status

    def _assign(self, assignment: Assignment) -> None:
        old = self.variables.get(assignment.name)
        if assignment.items is not None:
            items = self.fields(assignment.items)
            kept = old if isinstance(old, list) else [] if old is None else [old]
            self.variables[assignment.name] = [*kept, *items] if assignment.is_added else items
        elif assignment.is_added and isinstance(old, list):
            old[:1] = [(old[0] if old else "") + self.text(assignment.value or ())]
        else:
            before = self.value_of(assignment.name) if assignment.is_added else ""
            self.variables[assignment.name] = ("" if isinstance(before, Unset) else before) + self.text(
                assignment.value or ()
            )

    def _builtin(self, words: list[str], line: int) -> bool:
        """Execute a command that changes the script's state; record any other program as started."""
        name, *rest = words
        match name:
            case "[" | "test":
                return is_true(rest[: len(rest) - (name == "[")])
            case "true" | ":":
                return True
            case "false":
                return False
            case "shift":
                del self.arguments[: int(rest[0]) if rest and rest[0].isdecimal() else 1]
            case "set":
                if "--" in rest:
                    self.arguments = rest[rest.index("--") + 1 :]
            case "unset":
                for variable in rest:
                    self.variables.pop(variable, None)
            case "cd":
                folders = [word for word in rest if not word.startswith("-")]
                if folders and UNKNOWN not in folders[0]:
                    self.folder = Path(os.path.normpath(self.folder / Path(folders[0]).expanduser()))
            case "break" | "continue" | "return":
                raise _Left(name)
            case "exit":
                # A script that exits with an error lacks something, such as its arguments. Continue, to see
                # what it would do with them.
                if not rest or rest[0] == "0":
                    raise _Left(name)
            case "eval":
                self._chain(parse(" ".join(rest)))
            case "source" | ".":
                self._source(rest, line)
            case "export" | "declare" | "local" | "readonly" | "typeset":
                pass
            case _ if name in self.functions:
                self._call(name, rest)
            case _:
                self._start(words, line)
        return True

    def _call(self, name: str, arguments: list[str]) -> None:
        if self.depth > MAX_DEPTH:
            raise ConfigError(f"{self.file}: commands are nested more than {MAX_DEPTH} deep")
        outer, self.arguments = self.arguments, arguments
        self.depth += 1
        try:
            self._command(self.functions[name])
        except _Left as left:
            if left.what != "return":
                raise
        finally:
            self.arguments, self.depth = outer, self.depth - 1

    def _source(self, arguments: list[str], line: int) -> None:
        file = self._find(arguments[0]) if arguments else None
        if file is None:
            self.notes.append(f"line {line}: source {shown(' '.join(arguments))}: no such file")
            return
        inner, self.depth = self.depth, self.depth + 1
        if self.depth > MAX_DEPTH:
            raise ConfigError(f"{self.file}: scripts are nested more than {MAX_DEPTH} deep")
        self._chain(parse(self._read(file)))
        self.depth = inner

    def _start(self, words: list[str], line: int) -> None:
        if re.match(r"[+~]*[\w@]+\.[\w.@]+=", words[0]):
            self.notes.append(
                f"line {line}: {shown(words[0])} does not belong to the command above it, which ends at a "
                "comment or blank line"
            )
            return
        shells = [
            index for index, word in enumerate(words) if os.path.basename(word) in ("bash", "sh", "zsh")
        ]
        for index in shells:
            rest = words[index + 1 :]
            while (
                rest and rest[0].startswith("-") and not rest[0].startswith("-c") and "c" not in rest[0][1:]
            ):
                rest = rest[1:]
            if rest and rest[0].startswith("-") and len(rest) > 1:
                inner = self._apart()
                inner.arguments = rest[3:]
                inner.follow(parse(rest[1]))
                return
            if rest and (file := self._find(rest[0])) is not None:
                inner = self._apart()
                inner.arguments, inner.file = rest[1:], file
                inner.follow(parse(self._read(file)))
                return
        self.started.append((line, words))

    def _read(self, file: Path) -> str:
        text = read_script(file)
        self.spend(len(text))
        return text

    def _find(self, name: str) -> Path | None:
        if UNKNOWN in name:
            return None
        places = (self.folder / Path(name).expanduser(), self.file.parent / name)
        return next((place for place in places if place.is_file()), None)

    # -------------------------------------------------------------------------------------------------- words

    def fields(self, words: Sequence[Word]) -> list[str]:
        """Expand words to arguments.

        Unquoted values are split at blanks, empty ones vanish, and arrays give one argument per item. Braces
        are not expanded: in run scripts they are Hydra's dictionaries.
        """
        found: list[str] = []
        for word in words:
            found += self._fields(word)
        return found

    def _fields(self, word: Word) -> list[str]:
        fields: list[str] = []
        current, is_there = "", False
        for piece in word:
            values = self._values(piece)
            if piece.is_quoted or piece.kind == "text":
                is_there = is_there or len(values) > 0
            else:  # unquoted: the value of a program or variable is split
                values = [part for value in values for part in _split(value)]
                values = [] if values == [""] else values
            for index, value in enumerate(values):
                if index > 0:
                    fields.append(current)
                    current = ""
                current, is_there = current + value, is_there or bool(value) or piece.is_quoted
        if is_there:
            current = (
                os.path.expanduser(current) if word[0].kind == "text" and not word[0].is_quoted else current
            )
            fields.append(current)
        return fields

    def text(self, word: Word) -> str:
        """Expand a word to a single text, as on the right side of `=`."""
        value = "".join(" ".join(self._values(piece)) for piece in word)
        return (
            os.path.expanduser(value) if word and word[0].kind == "text" and not word[0].is_quoted else value
        )

    def _values(self, piece: WordPart) -> list[str]:
        self.spend(len(piece.value))
        values = self._expanded(piece)
        self.spend(sum(len(value) + 1 for value in values))
        return values

    def _expanded(self, piece: WordPart) -> list[str]:
        match piece.kind:
            case "text":
                return [piece.value]
            case "sum":
                return [calculate(piece.value, self)]
            case "command":
                return [self.output(piece.value)]
            case _:
                return expand_parameter(piece.value, self, is_quoted=piece.is_quoted)

    def value_of(self, name: str) -> str | Unset:
        """Return a variable as text; Unset if the script does not set it.

        The environment is another one than that in which the script runs, and may hold secrets.
        """
        if name in self.variables:
            value = self.variables[name]
            return (value[0] if value else "") if isinstance(value, list) else value
        special = {
            "PWD": str(self.folder),
            "HOME": os.path.expanduser("~"),
            "0": str(self.file),
            "BASH_SOURCE": str(self.file),
            "#": str(len(self.arguments)),
        }
        special |= {"?": "0", "$": "1", "!": "1", "-": "", "RANDOM": "0"}
        if name in special:
            return special[name]
        if name.isdecimal():
            index = int(name) - 1
            return self.arguments[index] if index < len(self.arguments) else Unset(name)
        return Unset(name)

    def items_of(self, name: str) -> list[str]:
        """Return the items of an array; a plain text is a single item."""
        if name in ("@", "*"):
            return self.arguments
        value = self.variables.get(name)
        if isinstance(value, list):
            return value
        single = self.value_of(name)
        return [] if isinstance(single, Unset) else [single]

    def output(self, text: str) -> str:
        """Return the output of a command, if it is one of the few that only process texts and paths.

        Returns an unknown value for all other commands.
        """
        inner = self._apart()
        # A command substitution starts nothing by itself: discard the programs that it records.
        inner.started = []
        printed: list[str] = []
        for _, _, command in parse(text).parts:
            if not isinstance(command, Simple):
                return unknown(f"$({text.strip()})")
            for assignment in command.assignments:
                inner._assign(assignment)
            words = inner.fields(command.words)
            if words and words[0] in ("cd", "set", ":"):
                inner._builtin(words, command.line)
            elif words:
                said = _printed(words, inner.folder)
                if said is None:
                    return unknown(f"$({' '.join(text.split())})")
                printed.append(said)
        return "\n".join(printed)


def read_script(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read as a script: {error}") from None


def _printed(words: Sequence[str], folder: Path) -> str | None:
    """Return the output of a command that needs no program; None for all other commands."""
    name, *rest = words
    paths = [word for word in rest if not word.startswith("-")]
    match name:
        case "pwd":
            return str(folder)
        case "echo":
            return " ".join(rest[1:] if rest[:1] in (["-n"], ["-e"]) else rest)
        case "printf" if len(rest) == 2 and rest[0] in ("%s", "%s\\n", "%d"):
            return rest[1]
        case "dirname" if paths:
            return os.path.dirname(paths[0]) or "."
        case "basename" if paths:
            return os.path.basename(paths[0].rstrip("/")).removesuffix(paths[1] if len(paths) > 1 else "")
        case "realpath" | "readlink" if paths:
            return os.path.normpath(folder / paths[-1])
        case "date":
            formats = [word[1:] for word in rest if word.startswith("+")]
            return time.strftime(formats[0]) if formats else None
    return None


def _split(value: str) -> list[str]:
    """Split at blanks, but not within an unknown part."""
    return re.findall(rf"(?:{UNKNOWN}[^{UNKNOWN}]*{UNKNOWN}|\S)+", value) or [""]
