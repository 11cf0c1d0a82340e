"""Function tools: a typed Python function, or a method of an environment, as a tool.

Its schema comes from annotations, defaults and docstring.
"""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar, overload

from docstring_parser import Docstring, ParseError
from docstring_parser import parse as parse_docstring
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticSerializationError, to_json

from agentrl.errors import PluginError
from agentrl.plugins.arguments import arguments_schema
from agentrl.plugins.blame import wrong_return
from agentrl.plugins.call_threads import CallThreads
from agentrl.plugins.contained import contained
from agentrl.plugins.tools import Runtime, Tool, ToolResult, not_run
from agentrl.types import JsonObject

F = TypeVar("F", bound=Callable[..., Any])

MAX_THREADS = 64
"""Concurrent calls of one blocking function, over all attempts of a process."""

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MARK = "__agentrl_tool__"


@overload
def tool(function: F, /) -> F: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    runtime: Runtime | None = None,
    is_idempotent: bool = False,
) -> Callable[[F], F]: ...
def tool(function: F | None = None, /, **options: Any) -> F | Callable[[F], F]:
    """Mark a typed function as a tool. The function itself is unchanged; loading its module registers the
    tool. A method of an `Environment` is a tool of the attempts that have this environment.

    Options and errors are those of `function_tool`.
    """

    def mark(function: F) -> F:
        setattr(function, MARK, function_tool(function, **options))
        return function

    return mark if function is None else mark(function)


def tool_of(value: object) -> type[Tool] | None:
    """Return the tool class that `@tool` made from a function; None for any other value.

    Raises:
        PluginError: a decorator above `@tool` wraps the function, and calls would bypass it.
    """
    made = vars(value).get(MARK) if inspect.isfunction(value) else None
    if made is not None and made.function is not value:  # functools.wraps copies the mark to the wrapper
        raise PluginError(
            f"tool function {made.name!r} has a decorator above @tool, which would be ignored; put @tool "
            "first"
        )
    return made


def function_tool(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    description: str | None = None,
    runtime: Runtime | None = None,
    is_idempotent: bool = False,
) -> type[Tool]:
    """Return the tool class that calls `function`; for a function under `@tool`, the class that it already
    has.

    A plain function runs in a thread and may block. An `async def` runs under `runtime`, by default asyncio.
    A method gets the attempt's environment as `self`.

    Args:
        name: the tool's name for the model; None: the function's name.
        description: what the tool does; None: the docstring without its sections.
        is_idempotent: whether a failed call can safely be retried.

    Raises:
        PluginError: a parameter has no annotation, cannot be passed by name, or has a type without a JSON
            schema; or there is no description.
    """
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        raise PluginError(
            f"{function!r} is not a Python function; a tool function is written with `def` or `async def`"
        )
    if (made := tool_of(function)) is not None:
        return made
    name = name or function.__name__
    label = f"tool function {name!r}"
    if not NAME.fullmatch(name):
        raise PluginError(f"{label}: a tool's name has 1 to 64 letters, digits, _ . or -")
    documented = _documented(function, label)
    description = (description or documented.description or "").strip()
    if not description:
        raise PluginError(
            f"{label} has no description: the model reads it in the docstring, or in @tool(description=...)"
        )
    arguments = _arguments(function, label)
    notes = {
        parameter.arg_name: parameter.description for parameter in documented.params if parameter.description
    }
    attributes = {
        "__doc__": description,
        "__module__": function.__module__,
        "name": name,
        "description": description,
        "parameters": arguments_schema(arguments, notes, label=label),
        "runtime": _runtime(function, runtime, label),
        "names_runtime": runtime is not None,
        "is_idempotent": is_idempotent,
        "function": staticmethod(function),
        "arguments": arguments,
        "threads": None if inspect.iscoroutinefunction(function) else CallThreads(label, num=MAX_THREADS),
    }
    return type(function.__name__, (MethodTool if _is_method(function) else FunctionTool,), attributes)


class FunctionTool(Tool):
    """A tool that calls `function` with arguments converted to the annotated types."""

    function: ClassVar[Callable[..., Any]]
    arguments: ClassVar[type[BaseModel]]
    """One field per parameter, with the parameter's name as alias: a field cannot be named `json` or `_x`."""
    names_runtime: ClassVar[bool]
    """Whether `@tool` says where an async function runs."""
    threads: ClassVar[CallThreads | None]
    """None: `function` is async. Else each call runs in a thread, which is abandoned at the deadline."""

    async def call(self, arguments: JsonObject) -> ToolResult:
        """Call the function. Text is returned unchanged, None as "", any other value as JSON.

        Invalid arguments give a result with `is_error`. Errors of the function pass unchanged.

        Raises:
            ToolError: the returned value has no JSON form.
        """
        try:
            given = self.arguments.model_validate(dict(arguments))
        except ValidationError as error:
            return not_run(_problem(error), self.parameters)
        fields = type(given).model_fields
        # Omitted parameters are not passed, so that the function uses its own default instead of a copy.
        value = await self._run(
            {str(fields[field].alias): getattr(given, field) for field in given.model_fields_set}
        )
        return value if isinstance(value, ToolResult) else ToolResult(self._text(value))

    async def _run(self, arguments: Mapping[str, Any]) -> Any:
        if self.threads is None:
            return await self._bound()(**arguments)
        return await self.threads.run(self._in_thread, arguments)

    def _in_thread(self, arguments: Mapping[str, Any]) -> Any:
        with contained():
            return self._bound()(**arguments)

    def _bound(self) -> Callable[..., Any]:
        return self.function

    def _text(self, value: object) -> str:
        if value is None or isinstance(value, str):
            return value or ""
        try:
            return to_json(value, fallback=_plain).decode()
        except (PydanticSerializationError, TypeError) as error:
            cure = f"return a text, a ToolResult, or data with a JSON form ({error})"
        raise wrong_return(f"tool {self.name!r}", self.function, value, cure)


class MethodTool(FunctionTool):
    """A tool that calls a method of the attempt's environment."""

    @classmethod
    def of(cls, environment: type[Any]) -> type[MethodTool]:
        """Return the tool for a class of environments: an async method runs where its `start` runs, unless
        `@tool` says otherwise.
        """
        if cls.threads is not None or cls.names_runtime or cls.runtime == environment.runtime:
            return cls
        return type(cls.__name__, (cls,), {"runtime": environment.runtime, "__module__": cls.__module__})

    def _bound(self) -> Callable[..., Any]:
        assert self.environment is not None, f"{self.name}: only rows with its environment offer it"
        return functools.partial(self.function, self.environment)


def _is_method(function: Callable[..., Any]) -> bool:
    """Return whether a function is defined in a class body and has a parameter `self`."""
    is_in_class = "." in function.__qualname__.rpartition("<locals>.")[2]
    return inspect.isfunction(function) and is_in_class and "self" in inspect.signature(function).parameters


def _documented(function: Callable[..., Any], label: str) -> Docstring:
    """Parse a docstring in Google, numpy or Sphinx style."""
    try:
        return parse_docstring(inspect.getdoc(function) or "")
    except ParseError as error:
        raise PluginError(f"{label}: the docstring cannot be read: {' '.join(str(error).split())}") from error


def _runtime(function: Callable[..., Any], runtime: Runtime | None, label: str) -> Runtime:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise PluginError(f"{label} is a generator; return the whole result")
    if inspect.iscoroutinefunction(function):
        return runtime or "asyncio"
    if runtime is not None:
        raise PluginError(
            f"{label}: runtime={runtime!r} is for `async def`; a plain function runs in a thread"
        )
    return "trio"


def _arguments(function: Callable[..., Any], label: str) -> type[BaseModel]:
    """Return the pydantic model that checks and converts the arguments."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError, SyntaxError) as error:
        raise PluginError(f"{label}: an annotation cannot be read: {error}") from error
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self" and _is_method(function):
            continue
        _check_parameter(parameter, hints, label)
        is_required = parameter.default is parameter.empty
        fields[f"argument_{len(fields)}"] = (
            hints[parameter.name],
            Field(... if is_required else parameter.default, alias=parameter.name),
        )
    try:
        return create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)
    except (PydanticUserError, TypeError) as error:
        raise PluginError(f"{label}: {' '.join(str(error).split())}") from error


def _check_parameter(parameter: inspect.Parameter, hints: Mapping[str, Any], label: str) -> None:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise PluginError(
            f"{label}: parameter `{parameter}` cannot be passed by name; write plain or keyword-only "
            "parameters"
        )
    if parameter.name not in hints:
        raise PluginError(
            f"{label}: parameter {parameter.name!r} has no annotation; write `{parameter.name}: str`, or its "
            "type"
        )
    if isinstance(parameter.default, FieldInfo):
        raise PluginError(
            f"{label}: parameter {parameter.name!r}: write Annotated[..., Field(...)] and a plain default"
        )


def _problem(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]


def _plain(value: object) -> Any:
    """Convert numpy scalars and arrays to Python values."""
    convert = getattr(value, "tolist", None)
    if not callable(convert):
        raise TypeError(f"{type(value).__name__} cannot be converted to JSON")
    return convert()
