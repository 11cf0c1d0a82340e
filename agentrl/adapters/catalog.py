"""All plugins that a config names, in one registry."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from agentrl.adapters.verl_interactions import verl_interactions
from agentrl.adapters.verl_tools import verl_function_tools, verl_tools
from agentrl.config.agent import AgentConfig
from agentrl.config.schema import Config
from agentrl.errors import PluginError
from agentrl.plugins import Plugins, Tool, load_plugins
from agentrl.plugins.sources import function_reference


def open_plugins(agent: AgentConfig) -> Plugins:
    """Return the registered plugins, with the user's files and modules, the tools of MCP servers and what verl's files name.

    Raises:
        PluginError: a source does not exist or fails to import, or two tools have one name.
        ToolError: an MCP server did not come up.
    """
    plugins = load_plugins(agent.plugins)
    tools = _tools(agent)
    for tool in tools.values():
        plugins.tools.add(tool)
    if agent.verl_interaction_config:
        for interaction in verl_interactions(agent.verl_interaction_config):
            plugins.interactions.add(interaction)
    return dataclasses.replace(plugins, served_tools=tuple(tools))


def named_plugins(config: Config) -> Plugins:
    """Return what `open_plugins` returns, with every plugin that the config names by file or module loaded as well.

    Raises:
        PluginError, ToolError: as `open_plugins`; or a name of the config is unknown.
    """
    plugins = open_plugins(config.agent)
    for name in config.agent.tools:
        plugins.tools.resolve(name)
    plugins.agents.resolve(config.agent.default)
    for name in config.reward.sources.values():
        if function_reference(name) is None:
            plugins.rewards.resolve(name)
    return plugins


def _tools(agent: AgentConfig) -> dict[str, type[Tool]]:
    """Return the tools that are served to the run, by name; two of one name are refused, one of a built-in's replaces it."""
    tools: dict[str, type[Tool]] = {}
    for source, found in _sources(agent):
        for tool in found:
            if tool.name in tools:
                raise PluginError(f"agent.{source}: there already is a tool {tool.name!r} of another server or file; rename one of them")
            tools[tool.name] = tool
    return tools


def _sources(agent: AgentConfig) -> Iterator[tuple[str, list[type[Tool]]]]:
    if agent.mcp_servers:
        # The client takes most of a second to import: only where there is a server.
        from agentrl.adapters.mcp import mcp_tools

        yield "mcp_servers", mcp_tools(agent.mcp_servers)
    if agent.verl_tool_config:
        yield "verl_tool_config", verl_tools(agent.verl_tool_config)
    if agent.verl_function_tools:
        yield "verl_function_tools", verl_function_tools(agent.verl_function_tools)
