"""The base class of verl's tools: one instance per process, one id per attempt."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from agentrl.extras.verl.shim.utils.rollout_trace import rollout_trace_op

from .schemas import OpenAIFunctionToolSchema, ToolResponse


class BaseTool:
    """Subclasses override `execute`, and other methods if they need them."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.config = config
        self.tool_schema = tool_schema
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ValueError(
                f"{type(self).__name__} has no tool schema: neither the YAML nor get_openai_tool_schema "
                "gives one"
            )
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Start an attempt and return its id."""
        return instance_id or str(uuid4()), ToolResponse()

    @rollout_trace_op
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Execute one call; return the response, its reward, and metrics."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the reward of the attempt's final state."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Discard the attempt's state."""
