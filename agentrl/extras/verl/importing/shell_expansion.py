"""Evaluation of parameters, arithmetic and tests in shell scripts; see `shell`."""

from __future__ import annotations

import ast
import fnmatch
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.extras.verl.importing.shell_syntax import Word, parse_word

UNKNOWN = "\ue000"
"""Delimiter around an unknown part of a value; between two of them is the reason."""


@dataclass(frozen=True, slots=True)
class Unset:
    """A variable without a value."""

    name: str


class ShellScope(Protocol):
    """The part of a shell that expansions need."""

    variables: dict[str, str | list[str]]
    arguments: list[str]

    def value_of(self, name: str) -> str | Unset: ...

    def items_of(self, name: str) -> list[str]: ...

    def text(self, word: Word) -> str:
        """Expand a word to a single text."""

    def spend(self, num_characters: int) -> None:
        """Take the work on so many characters from what may be done for the script."""


def unknown(what: str) -> str:
    """Return a value that is known only to `what`."""
    return f"{UNKNOWN}{what.replace(UNKNOWN, '')}{UNKNOWN}"


def shown(value: str) -> str:
    """Return a value for display, with its unknown parts as written in the script."""
    return value.replace(UNKNOWN, "")


def without_unset(value: str) -> str:
    """Return a value as a test sees it: unset variables are empty."""
    return re.sub(rf"{UNKNOWN}\$[^{UNKNOWN}(]*{UNKNOWN}", "", value)


# ------------------------------------------------------------------------------------------------- parameters

_FORM = re.compile(r"(?P<length>#)?(?P<name>\w+|[@*#?$!-])(?:\[(?P<index>[^\]]*)\])?(?P<rest>.*)", re.DOTALL)


def expand_parameter(text: str, shell: ShellScope, *, is_quoted: bool) -> list[str]:
    """Return the values of `${text}`: one value, or those of an array."""
    if text == "#":
        return [str(len(shell.arguments))]
    found = _FORM.fullmatch(text)
    if found is None:
        return [unknown(f"${{{text}}}")]
    name, index, rest = found["name"], found["index"], found["rest"]
    if index in ("@", "*") or name in ("@", "*"):
        items = list(shell.items_of(name))
        if found["length"]:
            return [str(len(items))]
        if rest.startswith(":") and (bounds := [part.strip() for part in rest[1:].split(":")])[0].isdecimal():
            first = int(bounds[0]) - (name in ("@", "*"))
            items = items[max(first, 0) :][
                : int(bounds[1]) if len(bounds) > 1 and bounds[1].isdecimal() else None
            ]
        elif rest:
            items = [_changed(item, rest, shell) for item in items] or (
                [_default(rest, shell)] if rest[:2] in (":-", ":+") else []
            )
        if is_quoted and (index == "*" or name == "*"):
            separator = shell.value_of("IFS")
            return [(separator[:1] if isinstance(separator, str) else " ").join(items)]
        return items
    value: str | Unset
    if index is not None:
        items, place = shell.items_of(name), calculate(index, shell)
        value = (
            items[int(place)]
            if place.lstrip("-").isdecimal() and -len(items) <= int(place) < len(items)
            else Unset(text)
        )
    else:
        value = shell.value_of(name)
    if isinstance(value, str) and not without_unset(value):
        value = value if value == "" else Unset(shown(value).lstrip("$"))
    if found["length"]:
        return [str(len(value)) if isinstance(value, str) else "0"]
    return [_parameter(value, rest, shell, name)]


def _parameter(value: str | Unset, rest: str, shell: ShellScope, name: str) -> str:
    is_set = isinstance(value, str) and (value != "" or not rest.startswith(":"))
    mark = rest.removeprefix(":")[:1]
    if (
        rest
        and mark in "-=+?"
        and (rest.startswith(":") or rest[0] == mark)
        and not rest.startswith((":0", ": "))
    ):
        if mark == "+":
            return _default(rest, shell) if is_set else ""
        if not is_set and mark == "=":
            shell.variables[name] = _default(rest, shell)
            return str(shell.variables[name])
        if not is_set:
            return _default(rest, shell) if mark == "-" else unknown(f"${name}")
        return str(value)
    if isinstance(value, Unset):
        return unknown(f"${value.name}")
    return _changed(value, rest, shell) if rest else value


def _default(rest: str, shell: ShellScope) -> str:
    """Expand the word after `:-` and similar operators, which has its own quotes."""
    return shell.text(parse_word(rest.removeprefix(":")[1:]))


def _changed(value: str, rest: str, shell: ShellScope) -> str:
    """Apply `#prefix`, `%suffix`, `/old/new`, `:offset:length`, `^^` and `,,` to a value."""
    shell.spend(len(value) ** 2)  # a pattern is tried at all places
    mark = next(
        (mark for mark in ("##", "#", "%%", "%", "//", "/", "^^", ",,", ":") if rest.startswith(mark)), ""
    )
    operand = rest[len(mark) :]
    if mark in ("^^", ",,") and not operand:
        return value.upper() if mark == "^^" else value.lower()
    if mark in ("#", "##", "%", "%%"):
        return _trimmed(value, mark, _default(f"-{operand}", shell))
    if mark in ("/", "//"):
        old, _, new = operand.partition("/")
        pattern = fnmatch.translate(_default(f"-{old}", shell)).removesuffix(r"\z").removesuffix(r"\Z")
        text = _default(f"-{new}", shell)
        shell.spend(len(value) * len(text))
        return re.sub(pattern, lambda _: text, value, count=1 if mark == "/" else 0)
    bounds = [part.strip() for part in operand.split(":")]
    if mark == ":" and all(re.fullmatch(r"-?\d+", bound) for bound in bounds) and len(bounds) <= 2:
        behind = value[int(bounds[0]) :]
        return behind[: int(bounds[1])] if len(bounds) == 2 else behind
    return unknown(f"${{...{rest}}}")


def _trimmed(value: str, mark: str, pattern: str) -> str:
    """Remove the shortest (`#`, `%`) or longest (`##`, `%%`) prefix or suffix that matches a pattern."""
    is_front, is_longest = mark[0] == "#", len(mark) == 2
    sizes = range(len(value) + 1)
    for size in reversed(sizes) if is_longest else sizes:
        part = value[:size] if is_front else value[len(value) - size :]
        if fnmatch.fnmatchcase(part, pattern):
            return value[size:] if is_front else value[: len(value) - size]
    return value


# ------------------------------------------------------------------------------------------------- arithmetic

_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),
    ast.FloorDiv: lambda a, b: int(a / b),
    ast.Mod: lambda a, b: a - b * int(a / b),
    ast.LShift: lambda a, b: a << min(b, 64),
    ast.RShift: operator.rshift,
    ast.Pow: lambda a, b: a ** min(b, 64),
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


_MAX_WHOLE = 2**63


def calculate(text: str, shell: ShellScope) -> str:
    """Return the value of an integer expression; unknown if one of its variables is."""
    expanded = shell.text(parse_word(f'"{text.strip()}"'))
    names = {name: shell.value_of(name) for name in re.findall(r"[A-Za-z_]\w*", without_unset(expanded))}
    if UNKNOWN in expanded or any(UNKNOWN in value for value in names.values() if isinstance(value, str)):
        return unknown(f"$(({shown(expanded)}))")
    try:
        tree = ast.parse(expanded.replace("&&", " and ").replace("||", " or ").strip() or "0", mode="eval")
        return str(int(_evaluate(tree.body, names)))
    except (SyntaxError, ValueError, LookupError, ArithmeticError, RecursionError, MemoryError):
        return unknown(f"$(({shown(expanded)}))")


def _evaluate(node: ast.expr, names: Mapping[str, str | Unset]) -> int:
    value = _evaluated(node, names)
    if abs(value) >= _MAX_WHOLE:
        raise ValueError("more than a shell can count")
    return value


def _evaluated(node: ast.expr, names: Mapping[str, str | Unset]) -> int:
    match node:
        case ast.Constant(int(value)):
            return int(value)
        case ast.Name(name):
            text = names[name]
            return int(text or "0") if isinstance(text, str) else 0
        case ast.BinOp(left, kind, right):
            return int(_OPERATORS[type(kind)](_evaluate(left, names), _evaluate(right, names)))
        case ast.Compare(left, [kind], [right]):
            return int(_OPERATORS[type(kind)](_evaluate(left, names), _evaluate(right, names)))
        case ast.UnaryOp(ast.USub(), operand):
            return -_evaluate(operand, names)
        case ast.UnaryOp(ast.Not(), operand):
            return int(not _evaluate(operand, names))
        case ast.BoolOp(kind, values):
            found = [_evaluate(value, names) != 0 for value in values]
            return int(all(found) if isinstance(kind, ast.And) else any(found))
    raise ValueError("no sum of whole numbers")


# ------------------------------------------------------------------------------------------------------ tests

_OF_TWO: Mapping[str, Callable[[str, str], bool]] = {
    "=": lambda a, b: fnmatch.fnmatchcase(a, b),
    "==": lambda a, b: fnmatch.fnmatchcase(a, b),
    "!=": lambda a, b: not fnmatch.fnmatchcase(a, b),
    "=~": lambda a, b: _is_found(b, a),
    "-eq": lambda a, b: int(a or "0") == int(b or "0"),
    "-ne": lambda a, b: int(a or "0") != int(b or "0"),
    "-lt": lambda a, b: int(a or "0") < int(b or "0"),
    "-le": lambda a, b: int(a or "0") <= int(b or "0"),
    "-gt": lambda a, b: int(a or "0") > int(b or "0"),
    "-ge": lambda a, b: int(a or "0") >= int(b or "0"),
    "<": operator.lt,
    ">": operator.gt,
}
_OF_ONE: Mapping[str, Callable[[str], bool]] = {
    "-z": lambda a: a == "",
    "-n": lambda a: a != "",
    "-f": os.path.isfile,
    "-d": os.path.isdir,
    "-e": os.path.exists,
    "-s": lambda a: os.path.isfile(a) and os.path.getsize(a) > 0,
    "-x": lambda a: os.access(a, os.X_OK),
    "-r": lambda a: os.access(a, os.R_OK),
    "-v": lambda a: False,
    "-t": lambda a: True,
}


_MAX_REPEATS, _MAX_SEARCHED = 4, 200


def _is_found(pattern: str, text: str) -> bool:
    """Return whether a pattern matches somewhere.

    Raises:
        ValueError: the search could take for ever.
    """
    is_nested = re.search(r"\)[*+{]", pattern) is not None
    if is_nested or sum(map(pattern.count, "*+{")) > _MAX_REPEATS or len(text) > _MAX_SEARCHED:
        raise ValueError("the pattern repeats too much")
    return re.search(pattern, text) is not None


def is_true(words: Sequence[str]) -> bool:
    """Return the result of `[ words ]`.

    A test that cannot be evaluated counts as true, like a program's status.
    """
    values = [without_unset(word) for word in words]
    for mark, combine in (("||", any), ("-o", any), ("&&", all), ("-a", all)):
        if mark in values:
            parts: list[list[str]] = [[]]
            for value in values:
                parts = [*parts, []] if value == mark else [*parts[:-1], [*parts[-1], value]]
            return combine(is_true(part) for part in parts)
    if values[:1] == ["("] and values[-1:] == [")"]:
        return is_true(values[1:-1])
    if values[:1] == ["!"]:
        return not is_true(values[1:])
    try:
        match values:
            case []:
                return False
            case [value]:
                return value != ""
            case [mark, value] if mark in _OF_ONE:
                return _OF_ONE[mark](value)
            case [left, mark, right] if mark in _OF_TWO:
                return _OF_TWO[mark](left, right)
    except (ValueError, re.error):
        return True
    return True
