"""Limits for chat templates: the work of a render, and the sizes of the values in it.

A template is code of a stranger. Steps, texts, numbers and structures are counted, never timed, so that a
render gives the same result on every machine. What is created is bounded before it is created, because one
operation on large operands cannot be interrupted.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinMethodType, FunctionType, GeneratorType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 500_000
"""Loop iterations in one render. A conversation of 1,000 messages needs about 10,000."""
MAX_SIZE = 10_000_000
"""Characters and items of a text, list or mapping, however deep."""
MAX_ITEMS = 1_000_000
"""Of a list or mapping, at its top."""
MAX_WORK = 300_000_000
"""Characters and items that the operations of one render may read and write in total."""
MAX_BITS = 10_000
"""Of an integer."""
MAX_SOURCE = 1_000_000
"""Characters of a template. The longest packaged one has 30,000."""
WIDTH_FILTERS: Mapping[str, int] = {
    **dict.fromkeys(("batch", "center", "slice", "truncate", "wordwrap"), MAX_SIZE),
    **dict.fromkeys(("indent", "round", "tojson"), 1_000),
}
"""Filters whose numeric arguments are widths or counts, and the largest that they take."""
_REPEATING = frozenset({"indent", "join", "tojson", "urlize", "wordwrap"})
"""Filters that write a text beside each part of their value."""
_GROWING = frozenset({"replace", "join", "expandtabs", "translate"})
"""Methods of a text whose result may be much longer than what they are given."""
_ATOMS = frozenset({int, float, bool, type(None)})
_CONTAINERS = (list, tuple, dict)
_SIZED_KINDS = (str, *_CONTAINERS)
_JINJAS_OWN = frozenset({"_loop_vars", "_block_vars"})
"""Arguments that Jinja adds to each call."""
_SHORT = 100
"""Characters of a separator, which may be written any number of times."""

_STEP_WORK = MAX_WORK // MAX_STEPS
_CALL_WORK = 5 * _STEP_WORK
"""Of a call of a macro."""
_ROUNDS, _STEP, _SIZED = "agentrl_rounds", "agentrl_step", "agentrl_sized"


class _Render:
    """The render that runs: the work that is left, and structures whose sizes are known, by id.

    One for all threads, because it is asked in each operation: renders at the same time share their work.
    """

    __slots__ = ("left", "sizes")

    def __init__(self) -> None:
        self.left = MAX_WORK
        self.sizes: dict[int, tuple[object, int]] = {}


_render = _Render()


def begin_render() -> None:
    """Start to count the work of a render."""
    _render.left = MAX_WORK
    _render.sizes = {}


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which every render ends, with little memory; see `begin_render`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_shown, **options)
        own: dict[str, Callable[..., Any]] = {_ROUNDS: _rounds, _STEP: _step, _SIZED: _checked}
        self.filters = {
            **{name: _bounded(name, function) for name, function in self.filters.items()},
            **own,
        }
        self.globals["namespace"] = _Namespace
        del self.globals["lipsum"]

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Add a filter, or replace one, within the limits."""
        self.filters[name] = _bounded(name, function)

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        for loop in source.find_all(nodes.For):
            loop.iter = _filter(loop.iter, _ROUNDS, loop.lineno, _num_written(loop))
            # `loop(...)` starts further iterations without the filter above, so count them in the body
            if loop.recursive:
                loop.body.insert(0, _counted(loop))
        for block in source.find_all(nodes.AssignBlock):
            block.filter = nodes.Filter(block.filter, _SIZED, [], [], None, None, lineno=block.lineno)
        _Sized().visit(source)
        for macro in source.find_all(nodes.Macro):
            macro.body.insert(0, _counted(macro))
        for caller in source.find_all(nodes.CallBlock):
            caller.body.insert(0, _counted(caller))
        source.set_environment(self)
        return super()._generate(source, *args, **options)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:  # the usual case
            if (size := len(left) + len(right)) > MAX_SIZE:
                _check_size(size)
            return left + right
        if operator == "%" and isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else (right,))
        elif isinstance(left, int) and isinstance(right, int):
            _check_bits(operator, left, right)
        elif operator in "+*":
            _check_size(_size_of_result(operator, left, right))
        return _checked(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a text method, macro or function for the template.

        Only methods of built-in types check their numbers: a number given to a macro or function is data, as
        in messages.
        """
        if isinstance(function, BuiltinMethodType):
            _check_method(function, args, kwargs)
        elif isinstance(function, FunctionType) and hasattr(function, "__wrapped__"):
            # The sandbox's own function in place of `format` or `format_map` of a text.
            _check_format(function.__wrapped__.__self__, (*args, *kwargs.values()))
        else:  # a macro keeps values in a tuple or a mapping
            for value in args:
                if type(value) is not str:
                    _checked(value)
            for name, value in kwargs.items():
                if name not in _JINJAS_OWN:
                    _checked(value)
        return _checked(super().call(context, function, *args, **kwargs))


class _Namespace(Namespace):
    """A namespace whose text does not contain its values."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Sized(NodeTransformer):
    """Adds a size check to each `~` concatenation and to each list or mapping that is written out."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, _SIZED, node.lineno)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        if node.name == "tojson" and isinstance(node.node, nodes.Dict | nodes.List):
            self.generic_visit(node.node)  # nothing keeps the value itself
        else:
            self.generic_visit(node)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._sized(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return node if node.ctx != "load" else self._sized(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._sized(node)

    def _sized(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        try:
            node.as_const()
        except nodes.Impossible:
            return _filter(node, _SIZED, node.lineno)
        return node


def _filter(node: nodes.Node, name: str, lineno: int, *arguments: int) -> nodes.Filter:
    given: list[nodes.Expr] = [nodes.Const(value) for value in arguments]
    return nodes.Filter(node, name, given, [], None, None, lineno=lineno)


def _counted(node: nodes.Node) -> nodes.Node:
    step = _filter(nodes.Const(None), _STEP, node.lineno, _num_written(node))
    return nodes.ExprStmt(step, lineno=node.lineno)


def _num_written(node: nodes.Node) -> int:
    """Return the characters that the template itself contains within a node."""
    return sum(len(text.data) for text in node.find_all(nodes.TemplateData))


@jinja2.pass_context  # else Jinja counts while it compiles
def _rounds(_: Context, items: Iterable[Any], num_written: int) -> Iterator[Any]:
    work = _STEP_WORK + num_written
    for item in items:
        _render.left -= work
        if _render.left < 0:
            _spend(0)  # raises
        yield item


@jinja2.pass_context
def _step(_: Context, value: object, num_written: int) -> None:
    _spend(_CALL_WORK + num_written)


def _spend(work: int) -> None:
    _render.left -= work
    if _render.left < 0:
        raise jinja2.TemplateRuntimeError(
            f"it does more than {MAX_STEPS:,} loop iterations, or reads and writes more than {MAX_WORK:,} "
            "characters"
        )


def _shown(value: Any) -> Any:
    """Return a value that is written, after counting it."""
    if type(value) is not str:
        value = str(_checked(value))
    if (left := _render.left - len(value)) >= 0:
        _render.left = left
        return value
    return _spend(len(value))


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that counts its value and its result, and checks its arguments before."""
    first = int(hasattr(function, "jinja_pass_arg"))  # behind the context
    is_checked = name in WIDTH_FILTERS or name in ("format", "replace") or name in _REPEATING

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        if type(value := args[first]) is str:
            _render.left -= len(value)
        if is_checked and (kwargs or len(args) > first + 1):
            _check_filter(name, *args[first:], **kwargs)
        result = function(*args, **kwargs)
        return map(_checked, result) if type(result) is GeneratorType else _checked(result)

    return bounded


def _check_filter(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    others = (*args, *kwargs.values())
    if (limit := WIDTH_FILTERS.get(name)) is not None:
        for other in others:
            _check_number(other, limit)
    if name == "format":
        _check_format(str(value), others)
    elif name == "replace":
        _check_replace(str(value), *args[:2])
    elif name in _REPEATING:
        _check_repeated(max(_size(other) for other in others), value)


def _checked(value: Any) -> Any:
    """Return a value that was created, after counting it."""
    if type(value) is str:
        if (size := len(value)) > MAX_SIZE:
            _check_size(size)
        _render.left -= size
        if _render.left < 0:
            _spend(0)  # raises
    elif isinstance(value, _SIZED_KINDS):
        _check_size(_size(value))
        _spend(len(value))
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise jinja2.TemplateRuntimeError(f"it computes a number of more than {MAX_BITS:,} bits")
    elif isinstance(value, bytes | bytearray):
        raise jinja2.TemplateRuntimeError("it creates bytes; templates write text")
    return value


def _size(value: object) -> int:
    """Return the characters and items of a value, however deep.

    What is contained several times counts as often, but is visited once: nested lists may have a size of
    2**40.
    """
    if not isinstance(value, _CONTAINERS):
        return len(value) if isinstance(value, str) else 0
    known = _render.sizes.get(id(value))
    if known is not None:
        return known[1]
    size = 1 + len(value)
    _check_size(size, MAX_ITEMS)
    for part in itertools.chain(value, value.values()) if isinstance(value, dict) else value:
        if type(part) is str:
            size += len(part)
        elif type(part) not in _ATOMS:
            size += _size(part)
    _render.sizes[id(value)] = value, size  # keeps it alive, so that no other value gets its id
    return size


def _size_of_result(operator: str, left: object, right: object) -> int:
    if operator == "+":
        return _size(left) + _size(right)
    times = next((value for value in (left, right) if isinstance(value, int)), 1)
    return max(_size(left), _size(right)) * times


def _check_size(size: int, limit: int = MAX_SIZE) -> None:
    if size > limit:
        raise jinja2.TemplateRuntimeError(f"it creates a text or list of size {size:,}; at most {limit:,}")


def _check_number(value: object, limit: int = MAX_SIZE) -> None:
    """Refuse a width or count that is too large."""
    if isinstance(value, int) and abs(value) > limit:
        raise jinja2.TemplateRuntimeError(
            f"it passes the number {value if abs(value) < 10**18 else '10**18 or more'}"
        )


def _check_bits(operator: str, left: int, right: int) -> None:
    bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
    if operator in ("*", "**") and bits > MAX_BITS:
        raise jinja2.TemplateRuntimeError(f"it computes a number of more than {MAX_BITS:,} bits")


_WIDTH = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)|\{[^{}]*:[^{}]*\d{4}|\{[^{}]+\{")
"""In a format: a width of more than three digits, or one that is an argument."""


def _check_format(text: str, arguments: Iterable[object]) -> None:
    if _WIDTH.search(text):
        raise jinja2.TemplateRuntimeError("it formats to a width of more than three digits")
    num_fields = max(text.count("%"), text.count("{"))
    _check_size(len(text) + num_fields * max(map(_size, arguments), default=0))


def _check_method(method: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Check the arguments of a method of a built-in type, or of a function that is one."""
    for value in arguments:
        if type(value) is not str:
            _check_number(value)
    for value in named.values():
        _check_number(value)
    name, owner = method.__name__, method.__self__
    if type(owner) is str:
        _spend(len(owner))
        if name in _GROWING:
            _check_growing(name, owner, arguments, named)
    elif name == "strftime":
        _check_format(str(arguments[0]), ())


def _check_growing(name: str, owner: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    if name == "replace":
        _check_replace(owner, *arguments[:2])
    elif name == "join":
        _check_repeated(len(owner), *arguments)
    elif name == "expandtabs":
        widths = [value for value in (*arguments, *named.values()) if isinstance(value, int)]
        _check_size(len(owner) + owner.count("\t") * max(widths, default=8))
    else:
        raise jinja2.TemplateRuntimeError(f"it calls the method {name!r}, which is not supported")


def _check_replace(text: str, old: object = None, new: object = None) -> None:
    if isinstance(old, str) and isinstance(new, str):
        _check_size(len(text) + text.count(old) * len(new))


def _check_repeated(length: int, items: object = ()) -> None:
    """Check that a text of `length` may be written beside each item of `items`."""
    if length > _SHORT:
        _check_size(length * (_size(items) if isinstance(items, str | list | tuple | dict) else MAX_SIZE))
