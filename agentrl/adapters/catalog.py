"""All plugins that a config names, in one registry."""

from __future__ import annotations

import dataclasses

from agentrl.config.schema import AgentConfig
from agentrl.plugins import Plugins, Tool, load_plugins


def open_plugins(agent: AgentConfig) -> Plugins:
    """Return the registered plugins, with the user's files and modules, and the tools of MCP servers added.

    Raises:
        PluginError: a source does not exist or fails to import.
        ToolError: an MCP server did not come up.
    """
    plugins = load_plugins(agent.plugins)
    served: list[type[Tool]] = []
    if agent.mcp_servers:
        # The client takes most of a second to import: only where there is a server.
        from agentrl.adapters.mcp import mcp_tools

        served += mcp_tools(agent.mcp_servers)
    for tool in served:
        plugins.tools.add(tool)
    return dataclasses.replace(plugins, served_tools=tuple(tool.name for tool in served))
