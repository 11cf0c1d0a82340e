"""Parser for the shell scripts that start trainings.

It reads words, lists, conditions, loops, functions and here-documents. Nothing is expanded or run here.
Syntax that run scripts do not use (coprocesses, `select`) is not supported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WordPart:
    """A part of a word.

    `kind`: text, parameter (between `${` and `}`), command (`$(...)`), or sum (`$((...))`).
    """

    kind: str
    value: str
    is_quoted: bool


Word: TypeAlias = tuple[WordPart, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """`name=value`, `name+=value`, or `name=(words)`.

    Attributes:
        is_added: `+=`.
        value: a word; None for an array.
        items: the words of an array; None for a single value.
    """

    name: str
    is_added: bool
    value: Word | None
    items: tuple[Word, ...] | None


@dataclass(frozen=True, slots=True)
class Simple:
    """A simple command: its words, and the assignments before them (or after `export` and the like)."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Commands, each with the operator before it (`;`,
    `&&`, `||`, `|`), and whether `!` inverts its status.
    """

    parts: tuple[tuple[str, bool, Command], ...]


@dataclass(frozen=True, slots=True)
class If:
    branches: tuple[tuple[Chain, Chain], ...]
    otherwise: Chain | None


@dataclass(frozen=True, slots=True)
class For:
    name: str
    words: tuple[Word, ...] | None  # None: the script's own arguments
    body: Chain


@dataclass(frozen=True, slots=True)
class While:
    condition: Chain
    is_until: bool
    body: Chain


@dataclass(frozen=True, slots=True)
class CaseCommand:
    word: Word
    branches: tuple[tuple[tuple[Word, ...], Chain], ...]


@dataclass(frozen=True, slots=True)
class CommandGroup:
    """`{ ...; }`, or with `is_apart` a subshell `( ... )`, which has its own variables."""

    body: Chain
    is_apart: bool


@dataclass(frozen=True, slots=True)
class FunctionDefinition:
    name: str
    body: Command


@dataclass(frozen=True, slots=True)
class Test:
    """`[[ ... ]]` as words, or `(( ... ))` as an arithmetic expression."""

    words: tuple[Word, ...]
    arithmetic: str | None = None


Command: TypeAlias = Simple | If | For | While | CaseCommand | CommandGroup | FunctionDefinition | Test

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=")
_NAME = re.compile(r"[A-Za-z_]\w*")
_FUNCTION = re.compile(
    r"(?:function[ \t]+([\w:-]+)[ \t]*(?:\([ \t]*\))?|([\w:-]+)[ \t]*\([ \t]*\))(?=\s*[{(])"
)
_REDIRECTION = re.compile(r"(?:\d*|&)(<<<|<<-?|>>|>\||<>|[<>]&?|>)")
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_ENDS = frozenset({"then", "else", "elif", "fi", "do", "done", "esac", "}"})


MAX_CHARACTERS = 200_000
"""Longest script that is read; the longest of verl has a tenth of it."""


def parse(text: str) -> Chain:
    """Return the commands of a script.

    Raises:
        ConfigError: the script is too long, ends within a quote, word or compound command, or has a word in
            an invalid place.
    """
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"a script of {len(text):,} characters is not read; at most {MAX_CHARACTERS:,} are")
    reader = _Reader(text)
    chain = reader.chain(())
    if reader.at < len(text):
        raise reader.error(f"{text[reader.at]!r} is where no command can begin")
    return chain


def parse_word(text: str) -> Word:
    """Return the parts of one word, which may contain blanks: a default value, or the text within quotes."""
    reader = _Reader(text)
    pieces: list[WordPart] = []
    while reader.at < len(text):
        word = reader._word()
        if word is not None:
            pieces += word
        else:
            pieces.append(WordPart("text", text[reader.at], is_quoted=True))
            reader.at += 1
    return tuple(pieces)


class _Reader:
    """Reads a script from left to right; `at` is the index of the next character."""

    def __init__(self, text: str) -> None:
        self.text = text.replace("\r\n", "\n")
        self.at = 0
        # Here-documents that begin after this line: delimiter, whether tabs are stripped
        self._documents: list[tuple[str, bool]] = []

    def error(self, problem: str) -> ConfigError:
        return ConfigError(f"line {self._line()}: {problem}")

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    # ----------------------------------------------------------------------------------------------- commands

    def chain(self, ends: Sequence[str]) -> Chain:
        """Read commands up to one of `ends` (words or characters),
        which is not consumed, or the end of the text.
        """
        parts: list[tuple[str, bool, Command]] = []
        before = ";"
        while True:
            self._skip_blank(newlines=True)
            if self.at >= len(self.text):
                if ends:
                    raise self.error(f"the script ends before {' or '.join(ends)}")
                return Chain(tuple(parts))
            if any(self._is_at(end) if end in (")", ";;") else self._is_at_word(end) for end in ends):
                return Chain(tuple(parts))
            is_inverted = self._take_word("!")
            parts.append((before, is_inverted, self._command()))
            before = self._separator()

    def _separator(self) -> str:
        self._skip_blank()
        for mark in ("&&", "||", "|&", "|", ";;", ";", "&", "\n"):
            if self._is_at(mark):
                if mark == ";;":
                    return ";"  # belongs to a case, which consumes it
                self.at += len(mark)
                if mark == "\n":
                    self._skip_documents()
                return {"|&": "|", "&": ";", "\n": ";"}.get(mark, mark)
        return ";"

    def _command(self) -> Command:
        compound: dict[str, Callable[[], Command]] = {
            "if": self._if,
            "for": self._for,
            "while": self._while,
            "until": self._while,
            "case": self._case,
            "[[": self._test,
        }
        if (found := _FUNCTION.match(self.text, self.at)) is not None:
            self.at = found.end()
            self._skip_blank(newlines=True)
            return FunctionDefinition(found[1] or found[2], self._command())
        if self._is_at("(("):
            self.at += 2
            return self._with_redirections(Test((), self._until("))")))
        if self._is_at("("):
            self.at += 1
            return self._with_redirections(CommandGroup(self._closed(")"), is_apart=True))
        if self._take_word("{"):
            return self._with_redirections(CommandGroup(self._closed("}"), is_apart=False))
        for word, read in compound.items():
            if self._is_at_word(word):
                return self._with_redirections(read())
        return self._simple()

    def _with_redirections(self, command: Command) -> Command:
        self._skip_blank()
        while self._redirection():
            self._skip_blank()
        return command

    def _closed(self, end: str) -> Chain:
        body = self.chain((end,))
        self._expect(end)
        return body

    def _if(self) -> Command:
        branches: list[tuple[Chain, Chain]] = []
        otherwise = None
        word = "if"
        while word in ("if", "elif"):
            self._expect(word)
            condition = self._closed("then")
            branches.append((condition, self.chain(("elif", "else", "fi"))))
            word = next(end for end in ("elif", "else", "fi") if self._is_at_word(end))
        if word == "else":
            self._expect("else")
            otherwise = self.chain(("fi",))
        self._expect("fi")
        return If(tuple(branches), otherwise)

    def _for(self) -> Command:
        self._expect("for")
        self._skip_blank()
        if self._is_at("(("):
            self.at += 2
            # A counting loop: its body is read once, with the first value of its variable.
            name, _, first = self._until("))").partition(";")[0].strip().partition("=")
            words: tuple[Word, ...] | None = ((WordPart("sum", first, is_quoted=False),),)
        else:
            name, words = self._name(), None
            self._skip_blank(newlines=True)
            if self._take_word("in"):
                words = self._words()
        self._skip_blank(newlines=True)
        self._take(";")
        self._skip_blank(newlines=True)
        self._expect("do")
        return For(name.strip(), words, self._closed("done"))

    def _while(self) -> Command:
        is_until = self._is_at_word("until")
        self._expect("until" if is_until else "while")
        condition = self._closed("do")
        return While(condition, is_until, self._closed("done"))

    def _case(self) -> Command:
        self._expect("case")
        self._skip_blank()
        word = self._required_word()
        self._skip_blank(newlines=True)
        self._expect("in")
        branches: list[tuple[tuple[Word, ...], Chain]] = []
        while True:
            self._skip_blank(newlines=True)
            if self._take_word("esac"):
                return CaseCommand(word, tuple(branches))
            self._take("(")
            patterns = [self._required_word()]
            self._skip_blank()
            while self._take("|"):
                self._skip_blank()
                patterns.append(self._required_word())
                self._skip_blank()
            self._expect(")")
            body = self.chain((";;", "esac"))
            self._take(";;")
            branches.append((tuple(patterns), body))

    def _test(self) -> Command:
        self._expect("[[")
        words: list[Word] = []
        while True:
            self._skip_blank(newlines=True)
            if self._take_word("]]"):
                return Test(tuple(words))
            mark = next((mark for mark in ("&&", "||", "(", ")", "<", ">") if self._is_at(mark)), None)
            if mark is not None:
                self.at += len(mark)
                words.append((WordPart("text", mark, is_quoted=False),))
            else:
                words.append(self._required_word())

    def _simple(self) -> Command:
        line = self._line()
        assignments: list[Assignment] = []
        words: list[Word] = []
        while True:
            self._skip_blank()
            if self._redirection():
                continue
            declares = bool(words) and "".join(piece.value for piece in words[0]) in _DECLARING
            if (not words or declares) and (assignment := self._assignment()) is not None:
                assignments.append(assignment)
                continue
            word = self._word()
            if word is None:
                break
            words.append(word)
        if not words and not assignments:
            raise self.error(f"{self.text[self.at : self.at + 10]!r} is where no command can begin")
        return Simple(tuple(assignments), tuple(words), line)

    def _assignment(self) -> Assignment | None:
        found = _ASSIGNMENT.match(self.text, self.at)
        if found is None or found[2]:
            return None
        self.at = found.end()
        if self._take("("):
            items = self._words(newlines=True)
            self._expect(")")
            return Assignment(found[1], bool(found[3]), None, items)
        return Assignment(found[1], bool(found[3]), self._word() or (), None)

    def _redirection(self) -> bool:
        """Skip `> file`, `2>&1`, `<<END` and similar redirections; return whether there was one."""
        found = _REDIRECTION.match(self.text, self.at)
        if found is None or self.text.startswith(("<(", ">("), self.at):
            return False
        self.at = found.end()
        self._skip_blank()
        target = self._required_word()
        if found[1] in ("<<", "<<-"):
            self._documents.append(("".join(piece.value for piece in target), found[1] == "<<-"))
        return True

    def _skip_documents(self) -> None:
        for delimiter, strips in self._documents:
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                line = self.text[self.at : end if end >= 0 else len(self.text)]
                self.at = end + 1 if end >= 0 else len(self.text)
                if (line.lstrip("\t") if strips else line) == delimiter:
                    break
        self._documents.clear()

    # -------------------------------------------------------------------------------------------------- words

    def _words(self, *, newlines: bool = False) -> tuple[Word, ...]:
        words: list[Word] = []
        while True:
            self._skip_blank(newlines=newlines)
            word = self._word()
            if word is None:
                return tuple(words)
            words.append(word)

    def _required_word(self) -> Word:
        word = self._word()
        if word is None:
            raise self.error("a word is missing")
        return word

    def _word(self) -> Word | None:
        """Read a word; None if no word begins here."""
        pieces: list[WordPart] = []
        plain = ""

        def add(piece: WordPart | None = None) -> None:
            nonlocal plain
            if plain:
                pieces.append(WordPart("text", plain, is_quoted=False))
            plain = ""
            if piece is not None:
                pieces.append(piece)

        while self.at < len(self.text) and (char := self.text[self.at]) not in " \t\n;&|)":
            if char in "<>" or (char == "(" and not plain):
                if self.text.startswith(("<(", ">("), self.at):
                    self.at += 2
                    add(WordPart("command", self._balanced(")"), is_quoted=True))
                    continue
                break
            if char == "(":
                # An extglob pattern, or a call in an override
                self.at += 1
                plain += f"({self._balanced(')')})"
            elif self._is_at("\\\n"):
                self.at += 2  # the word continues in the next line
            elif char == "\\":
                add(WordPart("text", self.text[self.at + 1 : self.at + 2], is_quoted=True))
                self.at += 2
            elif char == "'":
                add(WordPart("text", self._quoted("'"), is_quoted=True))
            elif self.text.startswith("$'", self.at):
                self.at += 1
                value = self._quoted("'").replace("\\n", "\n").replace("\\t", "\t").replace("\\\\", "\\")
                add(WordPart("text", value, is_quoted=True))
            elif char == '"' or self.text.startswith('$"', self.at):
                self.at += char == "$"
                add()
                pieces += self._double_quoted()
            elif char in "$`" and (piece := self._expansion(is_quoted=False)) is not None:
                add(piece)
            else:
                plain += char
                self.at += 1
        add()
        return tuple(pieces) if pieces else None

    def _quoted(self, mark: str) -> str:
        end = self.text.find(mark, self.at + 1)
        if end < 0:
            raise self.error(f"the quote {mark} is not closed")
        value = self.text[self.at + 1 : end]
        self.at = end + 1
        return value

    def _double_quoted(self) -> list[WordPart]:
        self.at += 1
        pieces: list[WordPart] = []
        plain = ""
        while not self._is_at('"'):
            if self.at >= len(self.text):
                raise self.error('the quote " is not closed')
            char = self.text[self.at]
            if char == "\\" and self.text[self.at + 1 : self.at + 2] in '"\\$`\n':
                plain += self.text[self.at + 1].replace("\n", "")
                self.at += 2
            elif char in "$`" and (piece := self._expansion(is_quoted=True)) is not None:
                pieces += [WordPart("text", plain, is_quoted=True), piece]
                plain = ""
            else:
                plain += char
                self.at += 1
        self.at += 1
        return [*pieces, WordPart("text", plain, is_quoted=True)]

    def _expansion(self, *, is_quoted: bool) -> WordPart | None:
        """Read `$name`, `${...}`, `$(...)`, `$((...))` or a command in backquotes.

        Returns None if `$` is an ordinary character.
        """
        if self._is_at("`"):
            return WordPart("command", self._quoted("`"), is_quoted)
        if self._is_at("$(("):
            self.at += 3
            return WordPart("sum", self._until("))"), is_quoted)
        if self._is_at("$("):
            self.at += 2
            return WordPart("command", self._balanced(")"), is_quoted)
        if self._is_at("${"):
            self.at += 2
            return WordPart("parameter", self._balanced("}"), is_quoted)
        name = _NAME.match(self.text, self.at + 1)
        if name is None and self.text[self.at + 1 : self.at + 2] not in tuple("0123456789@*#?$!-"):
            return None
        value = name[0] if name is not None else self.text[self.at + 1]
        self.at += 1 + len(value)
        return WordPart("parameter", value, is_quoted)

    def _balanced(self, closing: str) -> str:
        """Read up to the `closing` bracket that matches the bracket already consumed; consume it too."""
        opening, depth, start = {")": "(", "}": "{"}[closing], 1, self.at
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\\":
                self.at += 1
            elif char == "'" and closing == ")":
                self._quoted("'")
                continue
            elif char == '"':
                self._double_quoted()
                continue
            elif char == opening:
                depth += 1
            elif char == closing:
                depth -= 1
                if depth == 0:
                    self.at += 1
                    return self.text[start : self.at - 1]
            self.at += 1
        raise self.error(f"{opening} is not closed")

    def _until(self, end: str) -> str:
        """Read up to `end`, and consume it; parentheses in between must be balanced."""
        start, depth = self.at, 0
        while self.at < len(self.text):
            if depth == 0 and self._is_at(end):
                self.at += len(end)
                return self.text[start : self.at - len(end)]
            depth += {"(": 1, ")": -1}.get(self.text[self.at], 0)
            self.at += 1
        raise self.error(f"{end} is missing")

    def _name(self) -> str:
        found = _NAME.match(self.text, self.at)
        if found is None:
            raise self.error("a name is missing")
        self.at = found.end()
        return found[0]

    # -------------------------------------------------------------------------------------------------- marks

    def _skip_blank(self, *, newlines: bool = False) -> None:
        """Skip blanks, continued lines and comments; with `newlines`, line ends too."""
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t\r":
                self.at += 1
            elif self._is_at("\\\n"):
                self.at += 2
            elif char == "#":
                end = self.text.find("\n", self.at)
                self.at = end if end >= 0 else len(self.text)
            elif newlines and char == "\n":
                self.at += 1
                self._skip_documents()
            else:
                return

    def _is_at(self, mark: str) -> bool:
        return self.text.startswith(mark, self.at)

    def _is_at_word(self, word: str) -> bool:
        behind = self.text[self.at + len(word) : self.at + len(word) + 1]
        return self._is_at(word) and (not behind or behind in " \t\r\n;&|()")

    def _take(self, mark: str) -> bool:
        is_there = self._is_at(mark)
        self.at += len(mark) * is_there
        return is_there

    def _take_word(self, word: str) -> bool:
        is_there = self._is_at_word(word)
        if is_there:
            self.at += len(word)
            self._skip_blank()
        return is_there

    def _expect(self, word: str) -> None:
        if not self._is_at(word):
            raise self.error(f"{word!r} is missing")
        self.at += len(word)
        if word in _ENDS:
            self._skip_blank()
