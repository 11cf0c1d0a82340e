"""All plugins that a config names, in one registry."""

from __future__ import annotations

from agentrl.config.schema import AgentConfig
from agentrl.plugins import Plugins, load_plugins


def open_plugins(agent: AgentConfig) -> Plugins:
    """Return the registered plugins, with the user's files and modules added.

    Raises:
        PluginError: a source does not exist or fails to import.
    """
    return load_plugins(agent.plugins)
