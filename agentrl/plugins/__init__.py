"""Extension points: agent loops, tools, interactions, environments and rewards, and the registry that finds
them by name.

from agentrl.plugins import AgentLoop, Tool, ToolResult, tool, Interaction, InteractionReply, Reward,
RewardResult
"""

from agentrl.plugins.agents import (
    AGENT_ALIASES,
    AgentLoop,
    Conversing,
    OpenAIEndpoint,
    Session,
    TurnLimits,
    tools_for,
)
from agentrl.plugins.environments import Environment, Unreachable, environment_tools
from agentrl.plugins.functions import function_tool, tool, tool_of
from agentrl.plugins.interactions import Interaction, InteractionReply
from agentrl.plugins.loaded import Plugins, load_plugins
from agentrl.plugins.registry import Registry
from agentrl.plugins.rewards import (
    AnyReward,
    Attempted,
    BatchReward,
    GroupReward,
    Reward,
    RewardResult,
    TurnReward,
)
from agentrl.plugins.sources import Reference, import_source, locate
from agentrl.plugins.tools import Runtime, Tool, ToolResult, WrongCall, not_run

__all__ = [
    "AGENT_ALIASES",
    "AgentLoop",
    "AnyReward",
    "Attempted",
    "BatchReward",
    "Conversing",
    "Environment",
    "GroupReward",
    "Interaction",
    "InteractionReply",
    "OpenAIEndpoint",
    "Plugins",
    "Reference",
    "Registry",
    "Reward",
    "RewardResult",
    "Runtime",
    "Session",
    "Tool",
    "ToolResult",
    "TurnLimits",
    "TurnReward",
    "Unreachable",
    "WrongCall",
    "environment_tools",
    "function_tool",
    "import_source",
    "load_plugins",
    "locate",
    "not_run",
    "tool",
    "tool_of",
    "tools_for",
]
