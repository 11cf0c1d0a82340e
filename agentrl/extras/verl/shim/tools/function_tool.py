"""verl's function tools: a decorator that registers typed functions, and the conversion of their return
values.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from docstring_parser import parse

from agentrl.plugins.functions import function_tool as tool_of_function

from .schemas import OpenAIFunctionToolSchema, ToolResponse

logger = logging.getLogger(__name__)


@dataclass
class FunctionTool:
    """A registered function with its schema."""

    name: str
    fn: Callable[..., Any]
    tool_schema: OpenAIFunctionToolSchema
    is_async: bool = False

    async def call(self, parameters: dict[str, Any]) -> Any:
        """Call the function; a synchronous one runs in a thread."""
        return await (self.fn(**parameters) if self.is_async else asyncio.to_thread(self.fn, **parameters))


FUNCTION_TOOL_REGISTRY: dict[str, FunctionTool] = {}
_LOADED_FUNCTION_TOOL_PATHS: dict[str, list[FunctionTool]] = {}


def function_tool(
    name: str | Callable[..., Any] | None = None,
    *,
    schema: OpenAIFunctionToolSchema | dict[str, Any] | None = None,
) -> Any:
    """Register a function as a tool: `@function_tool`, or `@function_tool("name")`.

    schema: replaces the schema derived from the function.

    Raises:
        ValueError: the name is taken, or no schema can be derived: each parameter needs a type and a
            description.
    """
    if callable(name) and schema is None:
        return function_tool()(name)

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        tool_name = name if isinstance(name, str) else function.__name__
        taken = FUNCTION_TOOL_REGISTRY.get(tool_name)
        if taken is not None and taken.fn is not function:
            raise ValueError(
                f"function tool {tool_name!r} is already registered by "
                f"{taken.fn.__module__}.{taken.fn.__qualname__}"
            )
        described = _described(function, tool_name) if schema is None else schema
        if isinstance(described, dict):
            described = OpenAIFunctionToolSchema.model_validate(described)
        FUNCTION_TOOL_REGISTRY[tool_name] = FunctionTool(
            tool_name, function, described, inspect.iscoroutinefunction(function)
        )
        return function

    return register


def get_function_tool(name: str) -> FunctionTool:
    """Return a registered tool; raise KeyError if no tool has this name."""
    if name not in FUNCTION_TOOL_REGISTRY:
        raise KeyError(
            f"no function tool {name!r}; registered: {', '.join(FUNCTION_TOOL_REGISTRY) or 'none'}"
        )
    return FUNCTION_TOOL_REGISTRY[name]


def load_function_tools_from_path(path: str) -> list[FunctionTool]:
    """Run a Python file and return the tools that it registers. Each file is run once per process.

    Raises:
        FileNotFoundError: the file does not exist.
    """
    absolute = os.path.abspath(path)
    if not os.path.isfile(absolute):
        raise FileNotFoundError(f"function_tool_path does not exist: {path}")
    if absolute not in _LOADED_FUNCTION_TOOL_PATHS:
        before = set(FUNCTION_TOOL_REGISTRY)
        _run(absolute)
        added = sorted(set(FUNCTION_TOOL_REGISTRY) - before)
        if not added:
            logger.warning("function_tool_path %r: no @function_tool decorators found", path)
        _LOADED_FUNCTION_TOOL_PATHS[absolute] = [FUNCTION_TOOL_REGISTRY[name] for name in added]
    return _LOADED_FUNCTION_TOOL_PATHS[absolute]


def normalize_function_tool_return(ret: Any) -> tuple[ToolResponse, float, dict[str, Any]]:
    """Return response, reward and metrics. A function may omit the last two, or return None for them.

    Raises:
        TypeError: a tuple of another length.
    """
    if not isinstance(ret, tuple):
        return _response(ret), 0.0, {}
    if not 1 <= len(ret) <= 3:
        raise TypeError(
            f"a function tool returned a tuple of length {len(ret)}: {ret!r}; length 1, 2, or 3 would be "
            "right"
        )
    response, reward, metrics = (*ret, None, None)[:3]
    return (
        _response(response),
        0.0 if reward is None else float(reward),
        {} if metrics is None else dict(metrics),
    )


def _response(value: Any) -> ToolResponse:
    if isinstance(value, ToolResponse):
        return value
    return ToolResponse(text=json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value))


def _described(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """Return the schema of a typed and documented function."""
    documented = {
        parameter.arg_name: parameter.description
        for parameter in parse(inspect.getdoc(function) or "").params
    }
    if not inspect.getdoc(function):
        raise ValueError(f"function tool {name!r} has no docstring; the model reads it")
    for parameter in inspect.signature(function).parameters.values():
        what = f"function tool {name!r}: parameter {parameter.name!r}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(
                f"{what} is a variadic parameter, which no schema can describe; name each parameter"
            )
        if parameter.annotation is parameter.empty:
            raise ValueError(f"{what} is missing a type hint")
        if not documented.get(parameter.name):
            raise ValueError(f"{what}: the docstring has no description for the argument")
    schema = tool_of_function(function, name=name)().schema()
    for of_parameter in schema["function"]["parameters"]["properties"].values():
        _join_types(of_parameter)
    return schema


def _join_types(schema: dict[str, Any]) -> None:
    """Write unions of plain types as verl does: `type: [integer, number]`."""
    choices = schema.get("anyOf")
    if choices and all(set(choice) == {"type"} for choice in choices):
        del schema["anyOf"]
        schema["type"] = [choice["type"] for choice in choices]


def _run(path: str) -> None:
    name = "_verl_function_tools" + path.replace(os.sep, "_").replace(".", "_")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"function_tool_path is no Python file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
