"""The mutants of a module: its source with one small mistake each, of the kinds that people make.

A mutant replaces a span of the text, so its diff is what a reader would see. Left out is what no test should
see: annotations, decorators, the text of errors, assertions of our own, `zip(..., strict=True)`.

A number that has a name in capitals (`MAX_CHARS = 400`) is a choice. A test of 400 against 401 would only
repeat the line, so its mutants are a thousand times as much and a thousandth: a wrong unit, a limit that
refuses what is usual, or none at all. How it is compared is mutated like any other comparison. `return False`
becomes `return True` but not `return None`, which is as false to whoever asks.
"""

from __future__ import annotations

import ast
import difflib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

COMPARED = {
    ast.Lt: ("<=", ">="),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<="),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
COMPUTED = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "*",
    ast.Pow: "*",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.MatMult: "*",
}
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}


@dataclass(frozen=True)
class Mutant:
    """The bytes from `start` to `end` of the file's source are replaced by `text`."""

    path: str
    line: int
    start: int
    end: int
    text: str

    def of(self, source: bytes) -> bytes:
        """Return the mutated source."""
        return source[: self.start] + self.text.encode() + source[self.end :]

    def diff(self, source: bytes) -> str:
        """Return the lines that differ, with - and + in front."""
        old, new = (text.decode().splitlines() for text in (source, self.of(source)))
        lines = difflib.unified_diff(old, new, lineterm="", n=0)
        return "\n".join(line for line in lines if line[:1] in "+-" and not line.startswith(("---", "+++")))


def mutants(path: str, source: bytes) -> list[Mutant]:
    """Return all mutants of a module that compile and differ from it, in the order of the source."""
    found = {(m.start, m.end, m.text): m for m in _Module(path, source).mutants()}
    return [m for _, m in sorted(found.items()) if m.of(source) != source and _compiles(m.of(source))]


def _compiles(source: bytes) -> bool:
    try:
        compile(source, "<mutant>", "exec")
    except SyntaxError:
        return False
    return True


class _Module:
    def __init__(self, path: str, source: bytes) -> None:
        self._path = path
        self._source = source

    def mutants(self) -> Iterator[Mutant]:
        for node in _code(ast.parse(self._source)):
            yield from self._of(node)

    @cached_property
    def _starts(self) -> list[int]:
        """Offset of each line."""
        starts = [0]
        for line in self._source.split(b"\n"):
            starts.append(starts[-1] + len(line) + 1)
        return starts

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int | None, column: int | None) -> int:
        assert line is not None, "ast.parse says where all of its nodes end"
        assert column is not None
        return self._starts[line - 1] + column

    def _text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self._span(node)
        return self._source[start:end].decode()

    def _replaced(self, node: ast.expr | ast.stmt, text: str) -> Mutant:
        start, end = self._span(node)
        return Mutant(self._path, node.lineno, start, end, text)

    def _between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Mutant]:
        """Replace the operator between two operands, whatever brackets and lines are there too."""
        start, end = self._span(left)[1], self._span(right)[0]
        at = self._source[start:end].find(old.encode())
        if at >= 0:
            line = self._source[: start + at].count(b"\n") + 1
            yield Mutant(self._path, line, start + at, start + at + len(old), new)

    def _of(self, node: ast.AST) -> Iterator[Mutant]:
        match node:
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                for before, op, after in zip([left, *comparators], ops, comparators, strict=False):
                    for new in COMPARED[type(op)]:
                        yield from self._between(before, after, _symbol(op), new)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in COMPUTED:
                yield from self._between(left, right, _symbol(op), COMPUTED[type(op)])
            case ast.AugAssign(target=target, op=op, value=value):
                if type(op) in COMPUTED:
                    yield from self._between(target, value, _symbol(op) + "=", COMPUTED[type(op)] + "=")
                yield self._replaced(node, "pass")
            case ast.BoolOp(op=op, values=values):
                old, new = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
                for before, after in itertools.pairwise(values):
                    yield from self._between(before, after, old, new)
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                yield self._replaced(node, f"({self._text(operand)})")
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield self._replaced(test, f"(not ({self._text(test)}))")
            case ast.comprehension(ifs=ifs):
                for test in ifs:
                    yield self._replaced(test, "True")
            case ast.Constant(value=value):
                yield from self._of_constant(node, value)
            case ast.Slice(lower=lower, upper=upper):
                for bound in (lower, upper):
                    if bound is not None:
                        yield self._replaced(bound, f"({self._text(bound)}) + 1")
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name) as func) if name in SWAPPED:
                _, end = self._span(func)
                yield Mutant(self._path, func.end_lineno or 0, end - len(name), end, SWAPPED[name])
            case ast.Assign() | ast.AnnAssign() if (number := _named_number(node)) is not None:
                text = self._text(number)
                division = "/" if isinstance(_value(text), float) else "//"
                for scaled in (f"({text}) * 1000", f"({text}) {division} 1000"):
                    if _value(scaled) != _value(text):
                        yield self._replaced(number, scaled)
            case ast.Return(value=value) if value is not None and not _is_false_or_none(value):
                yield self._replaced(value, "None")
            case ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise():
                yield self._replaced(node, "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield self._replaced(node, "pass")
            case ast.Continue():
                yield self._replaced(node, "break")
            case ast.Break():
                yield self._replaced(node, "continue")

    def _of_constant(self, node: ast.Constant, value: object) -> Iterator[Mutant]:
        if isinstance(value, bool):
            yield self._replaced(node, str(not value))
        elif isinstance(value, int):
            yield self._replaced(node, str(value + 1))
            if value > 0:
                yield self._replaced(node, str(value - 1))
        elif isinstance(value, float):
            yield self._replaced(node, repr(value * 2 if value else 1.0))


def _symbol(op: ast.operator | ast.cmpop) -> str:
    """Return how Python writes the operator."""
    text = ast.unparse(
        ast.Compare(ast.Name("a"), [op], [ast.Name("b")])
        if isinstance(op, ast.cmpop)
        else ast.BinOp(ast.Name("a"), op, ast.Name("b"))
    )
    return text[2:-2]


def _is_false_or_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and (node.value is None or node.value is False)


def _named_number(node: ast.AST) -> ast.expr | None:
    """Return the value of `NAME = number`, a number or computed from numbers alone."""
    match node:
        case (
            ast.Assign(targets=[ast.Name(id=name)], value=value)
            | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
        ) if name.isupper():
            return value if _is_number(value) else None
    return None


def _is_number(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=value):
            return isinstance(value, int | float) and not isinstance(value, bool)
        case ast.UnaryOp(operand=operand):
            return _is_number(operand)
        case ast.BinOp(left=left, right=right):
            return _is_number(left) and _is_number(right)
    return False


def _value(text: str) -> float:
    return eval(text, {})  # type: ignore[no-any-return]  # numbers of our own source


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes whose mutants count, from the outside in."""
    yield node
    named = _named_number(node)
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        if _is_text_of_error(node, field) or (field == "value" and named is not None):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_left_out(child):
                yield from _code(child)


def _is_text_of_error(node: ast.AST, field: str) -> bool:
    return isinstance(node, ast.Raise) or (isinstance(node, ast.JoinedStr) and field == "values")


def _is_left_out(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.keyword(arg="strict"):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Assign(targets=[ast.Name(id="TYPE_CHECKING")]):
            return True
        case ast.Expr(value=ast.Call(func=ast.Name(id="assert_never"))):
            return True
    return False
