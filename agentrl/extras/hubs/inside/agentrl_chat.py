"""The chat loop of a hub process for verifiers: a harness that runs inside of this process instead of
launching a program per attempt. It calls the task's tools; it gives the model nothing else to run.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

from openai import AsyncOpenAI, OpenAIError
from verifiers.v1.configs.harness import HarnessConfig  # type: ignore[import-not-found]
from verifiers.v1.dialects.chat import message_to_wire  # type: ignore[import-not-found]
from verifiers.v1.harness import Harness  # type: ignore[import-not-found]
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp  # type: ignore[import-not-found]
from verifiers.v1.runtimes import ProgramResult  # type: ignore[import-not-found]

__all__ = ["AgentrlChat", "AgentrlChatConfig"]


class AgentrlChatConfig(HarnessConfig):
    pass


class AgentrlChat(Harness[AgentrlChatConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> ProgramResult:
        """Talk until a turn has no calls, or the rollout stops."""
        system, prompt = self.resolve_prompt(data)
        messages = [] if not system else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        elif prompt is not None:
            messages += [message_to_wire(message) for message in prompt]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            # A request that is sent again would be another turn; the attempt has a deadline of its own.
            client = await stack.enter_async_context(
                AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None)
            )
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            await _talk(client, ctx.model, trace, messages, tools, dispatch, connections)
        return ProgramResult(exit_code=0, stdout="", stderr="")


async def _talk(
    client: AsyncOpenAI,
    model: str,
    trace: Any,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    dispatch: dict[str, tuple[str, str]],
    connections: dict[str, Any],
) -> None:
    while True:
        asked: dict[str, Any] = {"model": model, "messages": messages, **({"tools": tools} if tools else {})}
        try:
            reply = await client.chat.completions.create(**asked)
        except OpenAIError:
            if trace.stop_condition is not None:  # a stop or a limit of the rollout
                return
            raise
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            content = await _called(call.function.name, call.function.arguments, dispatch, connections)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


async def _called(
    name: str, arguments: str, dispatch: dict[str, tuple[str, str]], connections: dict[str, Any]
) -> Any:
    """Return a tool's answer, or what was wrong with the call."""
    try:
        given = json.loads(arguments or "{}")
    except ValueError as error:
        return f"error: the arguments are not valid JSON: {error}"
    if not isinstance(given, dict):
        return "error: the arguments must be a JSON object"
    if name not in dispatch:
        return f"error: unknown tool {name!r}; tools: {', '.join(dispatch) or 'none'}"
    return await call_mcp(connections, dispatch, name, given)
