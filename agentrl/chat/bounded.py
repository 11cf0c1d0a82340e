"""Limits for chat templates: the steps of their loops and macros, and the sizes of their results.

The limits are counted, never timed, so that a render gives the same result on every machine.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 500_000
"""Loop iterations plus macro calls in one render. A conversation of 1,000 messages needs about 10,000."""
MAX_SIZE = 10_000_000
"""Characters of a text, or items of a list."""
MAX_POWER_BITS = 10_000
WIDTH_FILTERS = frozenset({"batch", "center", "indent", "slice", "truncate", "wordwrap"})
"""Filters whose numeric arguments are widths or counts."""

STEPS = "agentrl_steps"
"""Name of the context variable that counts the steps: a list with one item."""
_ROUNDS, _STEP, _SIZED = "agentrl_rounds", "agentrl_step", "agentrl_sized"


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which every render ends: loop iterations and macro calls count towards MAX_STEPS."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        own: dict[str, Callable[..., Any]] = {_ROUNDS: _rounds, _STEP: _step, _SIZED: _checked}
        self.filters = {
            **{name: _bounded(function, name in WIDTH_FILTERS) for name, function in self.filters.items()},
            **own,
        }

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        for loop in source.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _ROUNDS, [], [], None, None, lineno=loop.lineno)
            # `loop(...)` starts further iterations without the filter above, so count them in the body
            if loop.recursive:
                loop.body.insert(0, _counted(loop.lineno))
        for block in source.find_all(nodes.AssignBlock):
            block.filter = nodes.Filter(block.filter, _SIZED, [], [], None, None, lineno=block.lineno)
        _Sized().visit(source)
        for macro in source.find_all(nodes.Macro):
            macro.body.insert(0, _counted(macro.lineno))
        for caller in source.find_all(nodes.CallBlock):
            caller.body.insert(0, _counted(caller.lineno))
        source.set_environment(self)
        return super()._generate(source, *args, **options)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:  # the usual case
            _check_size(len(left) + len(right))
            return left + right
        if (
            operator == "**"
            and isinstance(left, int)
            and isinstance(right, int)
            and left.bit_length() * abs(right) > MAX_POWER_BITS
        ):
            raise jinja2.TemplateRuntimeError(f"a power of more than {MAX_POWER_BITS:,} bits")
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, str | list | tuple) and isinstance(times, int):
                    _check_size(len(text) * times)
        if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _check_size(len(left) + len(right))
        if operator == "%" and isinstance(left, str):
            _check_width(left)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a text method, macro or function for the template.

        Only methods of built-in types check their numbers: a number given to a macro or function is data, as
        in messages.
        """
        if isinstance(function, BuiltinMethodType):
            for value in (*args, *kwargs.values()):
                _check_number(value)
        return _checked(super().call(context, function, *args, **kwargs))


class _Sized(NodeTransformer):
    """Adds a size check to each `~` concatenation."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(node, _SIZED, [], [], None, None, lineno=node.lineno)


def _counted(lineno: int) -> nodes.Node:
    return nodes.ExprStmt(nodes.Filter(nodes.Const(None), _STEP, [], [], None, None), lineno=lineno)


@jinja2.pass_context
def _rounds(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    steps = context.get(STEPS)  # looked up once a loop
    for item in items:
        _count_step(steps)
        yield item


@jinja2.pass_context
def _step(context: Context, value: object = None) -> None:
    _count_step(context.get(STEPS))


def _count_step(steps: object) -> None:
    if isinstance(steps, list):
        steps[0] += 1
        if steps[0] > MAX_STEPS:
            raise jinja2.TemplateRuntimeError(
                f"it runs more than {MAX_STEPS:,} loop iterations and macro calls"
            )


def _bounded(function: Callable[..., Any], takes_widths: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        if takes_widths:
            for value in (*args, *kwargs.values()):
                _check_number(value)
        return _checked(function(*args, **kwargs))

    return bounded


def _checked(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        _check_size(len(value))
    return value


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise jinja2.TemplateRuntimeError(f"it creates a text or list of size {size:,}; at most {MAX_SIZE:,}")


def _check_number(value: object) -> None:
    """Refuse a width or count that is too large."""
    if isinstance(value, int) and abs(value) > MAX_SIZE:
        raise jinja2.TemplateRuntimeError(
            f"it passes the number {value if abs(value) < 10**18 else '10**18 or more'}"
        )


def _check_width(text: str) -> None:
    if re.search(r"\d{7}", text):
        raise jinja2.TemplateRuntimeError("it formats to a width of more than six digits")
