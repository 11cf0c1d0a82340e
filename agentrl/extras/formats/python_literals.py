"""A parser for lists of Python calls with literal arguments, without `ast`.

`ast.parse` needs the whole text, warns about unusual escapes, and can crash the process on deep nesting. This
parser also accepts what templates and models write beyond Python's grammar: unescaped line breaks and
apostrophes in strings, and JSON's true, false and null.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

from agentrl.chat.formats.json_calls import LOOKAHEAD, MAX_DEPTH, MAX_DIGITS, skip_space

_NAME = re.compile(r"[^\W\d][\w.]*")
_KEY = re.compile(r"([^\W\d]\w*)\s*=(?!=)\s*")
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*\.?[\d_]*|\.\d+)(?:[eE][+-]?\d+)?")
# A quote followed by a letter does not end a string, because templates do not escape apostrophes. It does
# where a value may begin: then the string before it was not closed, and would take in the next value. A
# string cannot contain the marks around calls; otherwise thousands of unclosed strings would each be
# searched to the end of the text.
_INSIDE = r"(?<![=,(\[{:])(?<![=,(\[{:] )"
_CONTENT = r"""[^'"\\<]++|<(?!\|tool_call_)|\\."""
_STRING = re.compile(
    rf"""[rRuU]?(?:'''(?:{_CONTENT}|"|'(?!''))*+'''|'(?!'')(?:{_CONTENT}|"|{_INSIDE}'(?=\w))*+')"""
    rf'''|[rRuU]?(?:"""(?:{_CONTENT}|'|"(?!""))*+"""|"(?!"")(?:{_CONTENT}|'|{_INSIDE}"(?=\w))*+")''',
    re.DOTALL,
)
_STRING_START = re.compile(r"""[rRuU]?['"]""")
_ESCAPE = re.compile(r"""\\(?:\n|[\\'"abfnrtv]|[0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})""")
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_LETTERS = {
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "\n": "",
    "\\": "\\",
    "'": "'",
    '"': '"',
}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


class MoreText(Exception):
    """The text read so far may continue in text to come."""


class NotPython(Exception):
    """The text is not a list of calls; `name` is the name of the call that cannot be read."""

    def __init__(self, reason: str, position: int, name: str) -> None:
        super().__init__(reason)
        self.position = position
        self.name = name


def read_calls(
    text: str, start: int, *, is_final: bool
) -> tuple[list[tuple[str, dict[str, Any] | str]], int]:
    """Read `[f(a=1), g()]`; return the calls and the position after the list.

    Each call is its name and its arguments, or its name and the reason why it cannot be used.

    Raises:
        MoreText: the list is incomplete, and `is_final` is False.
        NotPython: the list cannot be read.
    """
    reader = _Reader(text, start, is_final=is_final)
    calls: list[tuple[str, dict[str, Any] | str]] = []
    reader.expect("[")
    while not reader.takes("]"):
        calls.append(reader.call())
        if not reader.takes(","):
            reader.expect("]")
            break
    return calls, reader.position


def read_literal(text: str) -> Any:
    """Return the value of a literal that is the whole of `text`.

    Raises:
        NotPython: it is none.
    """
    reader = _Reader(f"{text.strip()}\n)", 0, is_final=True)  # a literal is read up to what follows it
    value = reader.literal()
    reader.expect(")")
    if reader.position < len(reader.text):
        raise NotPython("there is text behind the literal", reader.position, "")
    return value


class _Reader:
    def __init__(self, text: str, start: int, *, is_final: bool) -> None:
        self.text = text
        self.position = start
        self._is_final = is_final
        self._name = ""

    def call(self) -> tuple[str, dict[str, Any] | str]:
        self._name = ""
        self._skip_space()
        self._name = self._match(_NAME, "a function's name")[0]
        self.expect("(")
        arguments: dict[str, Any] = {}
        problem = ""
        while not self.takes(")"):
            self._wait_for_key()
            key = _KEY.match(self.text, self.position)
            if key is not None:
                self.position = key.end()
                arguments[key[1]] = self._value(0)
            else:
                self._value(0)
                problem = "arguments must be written as name=value"
            if not self.takes(","):
                self.expect(")")
                break
        return self._name, problem or arguments

    def literal(self) -> Any:
        """Read one value."""
        return self._value(0)

    def takes(self, character: str) -> bool:
        """Skip white space, and `character` if it follows; return whether it does."""
        self._skip_space()
        if not self.text.startswith(character, self.position):
            return False
        self.position += 1
        return True

    def expect(self, character: str) -> None:
        if not self.takes(character):
            self._fail(f"expected {character}")

    def _wait_for_key(self) -> None:
        """Ensure that the text after a name is known, because the name may be a key.

        Raises:
            MoreText: the text ends after the name.
            NotPython: it ends there, and no more text comes.
        """
        name = _NAME.match(self.text, self.position)
        if name is not None and skip_space(self.text, name.end()) == len(self.text):
            self._fail("the text ends", len(self.text))

    def _skip_space(self) -> None:
        self.position = skip_space(self.text, self.position)
        if self.position == len(self.text):
            self._fail("the text ends")

    def _match(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        match = pattern.match(self.text, self.position)
        if match is None:
            self._fail(f"expected {what}")
        self.position = match.end()
        if self.position == len(self.text):
            self._fail("the text ends")
        return match

    def _fail(self, reason: str, position: int | None = None) -> NoReturn:
        """Raise NotPython, or MoreText if more text could change a result this close to the end."""
        position = self.position if position is None else position
        if not self._is_final and len(self.text) - position < LOOKAHEAD:
            raise MoreText
        raise NotPython(reason, position, self._name)

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            # More text cannot help, so do not use _fail
            raise NotPython(f"nested too deeply, at most {MAX_DEPTH} levels", self.position, self._name)
        self._skip_space()
        opening = self.text[self.position]
        if opening == "{":
            return self._dictionary(depth)
        if opening in _CLOSING:
            return self._sequence(opening, depth)
        if _STRING_START.match(self.text, self.position):
            return self._strings()
        if number := _NUMBER.match(self.text, self.position):
            return self._number(number)
        word = self._match(_NAME, "a literal")
        if word[0] not in _WORDS:
            self.position = word.start()
            self._fail(f"{word[0][:40]!r} is not a literal")
        return _WORDS[word[0]]

    def _dictionary(self, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        self.position += 1
        while not self.takes("}"):
            key = self._value(depth + 1)
            if not isinstance(key, str):
                self._fail("a key must be a string")
            self.expect(":")
            values[key] = self._value(depth + 1)
            if not self.takes(","):
                self.expect("}")
                break
        return values

    def _sequence(self, opening: str, depth: int) -> Any:
        closing, values, is_tuple = _CLOSING[opening], [], opening == "["
        self.position += 1
        while not self.takes(closing):
            values.append(self._value(depth + 1))
            if not self.takes(","):
                self.expect(closing)
                break
            is_tuple = True
        return values if is_tuple or not values else values[0]  # (1) is 1, not a tuple

    def _strings(self) -> str:
        """Read a string and adjacent strings, which Python concatenates."""
        parts: list[str] = []
        while _STRING_START.match(self.text, self.position):
            match = _STRING.match(self.text, self.position)
            if match is None:
                if self._is_final:
                    raise NotPython("a string is not closed", self.position, self._name)
                raise MoreText
            self.position = match.end()
            parts.append(_unquoted(match[0]))
            self._skip_space()
        return "".join(parts)

    def _number(self, match: re.Match[str]) -> int | float:
        self._match(_NUMBER, "a number")
        digits = match[0].replace("_", "")
        if len(digits) > MAX_DIGITS:
            return float("inf")
        return float(digits) if any(mark in digits for mark in ".eE") else int(digits)


def _unquoted(written: str) -> str:
    is_raw = written[0] in "rR"
    quoted = written.lstrip("rRuU")
    width = 3 if len(quoted) >= 6 and quoted[:3] in ("'''", '"""') else 1
    inner = quoted[width:-width]
    return inner if is_raw else _ESCAPE.sub(_unescaped, inner)


def _unescaped(match: re.Match[str]) -> str:
    escape = match[0][1:]
    if escape in _LETTERS:
        return _LETTERS[escape]
    code = int(escape, 8) if escape[0].isdigit() else int(escape[1:], 16)
    return chr(code) if code < 0x110000 else match[0]
