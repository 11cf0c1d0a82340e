"""verl's tools as Tool classes: the classes of its YAML, and its function tools.

As in verl, a class has one instance per process, which distinguishes attempts by an id:
    create        at the first call of an attempt, with the task's `tools_kwargs[name].create_kwargs`
    execute       for each call, with `execute_kwargs`. Its reward is the turn's tool reward; numeric metrics
                  are reported
    calc_reward   once, after the agent loop, if the class overrides it, with `calc_reward_kwargs`. A number
                  is a tool reward
    release       always, if create returned, with `release_kwargs`
"""

from __future__ import annotations

import base64
import inspect
import io
import uuid
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from agentrl.errors import PluginError, ToolError
from agentrl.extras.verl import loading
from agentrl.plugins import Tool, ToolResult
from agentrl.plugins.blame import wrong_return
from agentrl.plugins.sources import locate
from agentrl.types import Image, JsonObject

BASE = "verl.tools.base_tool:BaseTool"


def verl_tools(path: str) -> list[type[Tool]]:
    """Return the tools of verl's YAML (`tools: [{class_name, config, tool_schema}, ...]`).

    Raises:
        PluginError: the file, a class or a schema is missing or invalid.
    """
    entries = loading.read_entries(path, "tools", option="verl_tool_config")
    return [_tool_of_entry(entry, where=f"agent.verl_tool_config={path!r}") for entry in entries]


def verl_function_tools(path: str) -> list[type[Tool]]:
    """Return the tools that a Python file registers with verl's `@function_tool`.

    Raises:
        PluginError: the file does not exist, fails, or registers no tool.
    """
    where = f"agent.verl_function_tools={path!r}"
    loader = loading.module("verl.tools.function_tool", where=where)
    try:
        functions = loader.load_function_tools_from_path(str(locate(path)))
    except Exception as error:  # boundary: any error of the user's file is a broken plugin
        raise PluginError(f"{where}: {loading.reason(error)}") from error
    if not functions:
        raise PluginError(f"{where}: the file has no function decorated with @function_tool")
    normalize = staticmethod(loader.normalize_function_tool_return)
    return [
        _class(VerlFunctionTool, _dumped(entry.tool_schema), where, implementation=entry, normalize=normalize)
        for entry in functions
    ]


class VerlTool(Tool):
    """A tool class of verl's. `implementation` is its one instance."""

    runtime = "asyncio"
    implementation: ClassVar[Any]
    has_reward: ClassVar[bool]
    """Whether the class overrides `calc_reward`."""
    _id: str | None = None

    async def start(self, **create_kwargs: Any) -> None:
        create = self.implementation.create
        made = await create(
            self.trajectory_key or uuid.uuid4().hex, **_create_arguments(create, create_kwargs)
        )
        self._id = str(made[0] if isinstance(made, tuple) else made)

    async def call(self, arguments: JsonObject) -> ToolResult:
        answer = await self.implementation.execute(
            self._id, dict(arguments), **self._kwargs("execute_kwargs")
        )
        return tool_result(answer, self.name, self.implementation.execute)

    async def score(self) -> float | None:
        if self._id is None or not self.has_reward:
            return None
        return loading.number(
            await self.implementation.calc_reward(self._id, **self._kwargs("calc_reward_kwargs"))
        )

    async def close(self) -> None:
        instance_id, self._id = self._id, None
        if instance_id is not None:
            await self.implementation.release(instance_id, **self._kwargs("release_kwargs"))

    def _kwargs(self, kind: str) -> dict[str, Any]:
        return dict(self.row_kwargs.get(kind) or {})


class VerlFunctionTool(Tool):
    """A function tool of verl's. `implementation` is its entry in verl's registry."""

    runtime = "asyncio"
    implementation: ClassVar[Any]
    normalize: ClassVar[Callable[[Any], Any]]

    async def call(self, arguments: JsonObject) -> ToolResult:
        answer = type(self).normalize(await self.implementation.call(dict(arguments)))
        return tool_result(answer, self.name, getattr(self.implementation, "fn", self.implementation.call))


def tool_result(answer: object, name: str, function: Callable[..., Any]) -> ToolResult:
    """Convert verl's (response, reward, metrics), which `function` returned.

    The response is text or a ToolResponse; its videos are replaced by a note.

    Raises:
        ToolError: it, or an image of it, has another type.
    """
    if not (isinstance(answer, tuple) and len(answer) == 3):
        raise wrong_return(
            f"tool {name!r}", function, answer, "verl's tools return (response, reward, metrics)"
        )
    response, reward, metrics = answer
    return ToolResult(
        _text(response, name),
        reward=loading.number(reward),
        metrics=loading.metrics(metrics),
        images=tuple(_image(image, name) for image in getattr(response, "image", None) or ()),
    )


def _text(response: Any, name: str) -> str:
    if isinstance(response, str):
        return response
    if not hasattr(response, "is_text_only"):
        raise ToolError(
            f"tool {name!r} answered with {type(response).__name__}; text or verl's ToolResponse is expected"
        )
    omitted = ["[video omitted]" for _ in getattr(response, "video", None) or ()]
    return "\n".join([*([response.text] if response.text else []), *omitted])


def _image(value: Any, name: str) -> Image:
    """Return an image in a form of verl's tools: a picture of Pillow, bytes, {bytes}, or a data URI."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("image")
    if isinstance(value, bytes):
        return Image(value)
    if isinstance(value, str) and value.startswith("data:"):
        return Image(base64.b64decode(value.partition(",")[2]))
    if not hasattr(value, "save"):
        raise ToolError(
            f"tool {name!r} answered with an image of type {type(value).__name__}; a picture of Pillow, "
            "bytes or a data URI is expected"
        )
    file = io.BytesIO()
    value.save(file, "PNG")
    return Image(file.getvalue())


def _tool_of_entry(entry: dict[str, Any], *, where: str) -> type[Tool]:
    class_name = entry["class_name"]
    config = entry.get("config") or {}
    if config.get("type", "native") != "native":
        raise PluginError(
            f"{where}: {class_name} has config.type={config['type']!r}; only native tools are loaded from "
            "here. Name MCP servers in agent.mcp_servers: `{name: {url: ...}}` or `{name: {command: [...]}}`"
        )
    given = entry.get("tool_schema")
    schemas = loading.module("verl.tools.schemas", where=where)
    try:
        tool_schema = None if given is None else schemas.OpenAIFunctionToolSchema.model_validate(given)
    except ValueError as error:
        raise PluginError(f"{where}: tool_schema of {class_name}: {' '.join(str(error).split())}") from error
    implementation = loading.create(class_name, where=where, config=config, tool_schema=tool_schema)
    # Prefer the YAML's own schema: verl's models do not know all of JSON schema and drop the rest.
    schema = given or _dumped(implementation.get_openai_tool_schema())
    has_reward = loading.overrides(implementation, "calc_reward", base=BASE)
    return _class(VerlTool, schema, where, implementation=implementation, has_reward=has_reward)


def _class(base: type[Tool], schema: JsonObject, where: str, **attributes: Any) -> type[Tool]:
    function = schema.get("function") or {}
    name, description = function.get("name"), function.get("description", "")
    if not name:
        raise PluginError(f"{where}: a tool_schema has no function.name")
    attributes |= {
        "__doc__": description,
        "name": name,
        "description": description,
        "parameters": function.get("parameters") or {"type": "object", "properties": {}},
    }
    return type(f"{base.__name__}_{name}", (base,), attributes)


def _dumped(schema: Any) -> dict[str, Any]:
    return schema.model_dump(exclude_unset=True, exclude_none=True)


def _create_arguments(create: Any, create_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments as `create` takes them: by name (verl 0.5), or all in `create_kwargs` (0.6 and
    later).
    """
    parameters = inspect.signature(create).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    if takes_any:
        return {**create_kwargs, "create_kwargs": create_kwargs}
    if any(parameter.name == "create_kwargs" for parameter in parameters):
        return {"create_kwargs": create_kwargs}
    return create_kwargs
