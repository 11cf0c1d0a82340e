"""The registry with all plugins that a config names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from agentrl.config.agent import AgentConfig
from agentrl.config.evaluation import EvalConfig
from agentrl.config.reward import REWARD_PRESETS, RewardConfig
from agentrl.errors import PluginError, concerning
from agentrl.plugins import Plugins, Registry, Tool, load_plugins
from agentrl.plugins.loaded import of_environment
from agentrl.plugins.sources import function_reference
from agentrl.registered import required


def open_plugins(agent: AgentConfig) -> Plugins:
    """Return the registered plugins, the user's files and modules, the tools of MCP servers, and those of
    verl's files.

    Raises:
        PluginError: a source does not exist or fails to import, or two tools have the same name.
        ToolError: an MCP server did not start.
    """
    with concerning("agent.plugins"):
        plugins = load_plugins(agent.plugins)
    tools = _tools(agent)
    for tool in tools.values():
        plugins.tools.add(tool)
    for interaction in _named_by(agent, "verl_interaction_config"):
        plugins.interactions.add(interaction)
    return dataclasses.replace(plugins, served_tools=tuple(tools))


def agent_plugins(agent: AgentConfig, *, further_tools: Iterable[str] = ()) -> Plugins:
    """Return `open_plugins`, after loading, creating and checking every plugin that the section names.

    Args:
        further_tools: more tools to check, those of `eval.tools`.

    Raises:
        PluginError, ToolError: as in `open_plugins`; or a name is unknown, or its plugin is malformed.
        ConfigError: a plugin rejects its config.
    """
    plugins = open_plugins(agent)
    for key, names in {"agent.tools": agent.tools, "eval.tools": further_tools}.items():
        for name in names:
            with concerning(key):
                if plugins.methods_named(name):
                    raise PluginError(of_environment(name))
                plugins.tools.create(name, agent.tool_config)
    with concerning("agent.default"):
        plugins.agents.create(agent.default, agent.agent_config)
    if agent.environment is not None:
        with concerning("agent.environment"):
            plugins.environment(agent.environment)
            plugins.environments.create(agent.environment, agent.environment_config)
    _check_settings(agent, plugins)
    return plugins


def named_plugins(agent: AgentConfig, reward: RewardConfig, validation: EvalConfig) -> Plugins:
    """Return `agent_plugins`, with the rewards that the sections name by file or module.

    Raises the same errors.
    """
    plugins = agent_plugins(agent, further_tools=validation.tools or ())
    for key, name in _rewards(reward, validation):
        with concerning(key):
            if function_reference(name) is None:
                plugins.rewards.resolve(name)
    return plugins


def _rewards(reward: RewardConfig, validation: EvalConfig) -> Iterator[tuple[str, str]]:
    """Yield the key and the name of every reward."""
    # The rewards of presets may be of a package that is not installed.
    chosen = sorted(reward.sources.items() - REWARD_PRESETS.items())
    yield from ((f"reward.sources.{source}", name) for source, name in chosen)
    yield from ((f"eval.rewards.{source}", name) for source, name in validation.rewards.items())
    yield from ((f"reward.terms.{name}", term.reward or name) for name, term in reward.terms.items())


def _check_settings(agent: AgentConfig, plugins: Plugins) -> None:
    """Refuse settings that no plugin reads.

    Raises:
        PluginError: no plugin has this name, or the plugin calls itself by another name.
    """
    settings: tuple[tuple[str, Registry[Any], Iterable[str]], ...] = (
        ("tool_config", plugins.tools, agent.tool_config),
        ("tool_limits", plugins.tools, agent.tool_limits),
        ("interaction_config", plugins.interactions, agent.interaction_config),
        ("environment_config", plugins.environments, agent.environment_config),
        ("agent_config", plugins.agents, agent.agent_config),
    )
    for key, registry, names in settings:
        for name in names:
            with concerning(f"agent.{key}.{name}"):
                if registry is plugins.tools and _is_method(name, plugins, is_config=key == "tool_config"):
                    continue
                own = registry.own_name(name)
                if own != name:
                    raise PluginError(
                        f"settings must be under the {registry.kind}'s own name: write agent.{key}.{own}"
                    )


def _is_method(name: str, plugins: Plugins, *, is_config: bool) -> bool:
    """Return whether a setting is that of an environment's method.

    Raises:
        PluginError: methods have no such settings, or several environments have a method of this name.
    """
    methods = plugins.methods_named(name)
    if methods and is_config:
        raise PluginError(
            "a method of an environment has no settings of its own: write agent.environment_config."
            f"{methods[0].partition('.')[0]}"
        )
    if len(methods) > 1:
        raise PluginError(f"several environments have this tool: write one of {', '.join(methods)}")
    return bool(methods)


def _tools(agent: AgentConfig) -> dict[str, type[Tool]]:
    """Return the external tools by name.

    Duplicates are refused; a tool may replace a built-in one of its name.
    """
    tools: dict[str, type[Tool]] = {}
    for source in ("mcp_servers", "verl_tool_config", "verl_function_tools"):
        for tool in _named_by(agent, source):
            if tool.name in tools:
                raise PluginError(
                    f"agent.{source}: another server or file already has a tool {tool.name!r}; rename one of "
                    "them"
                )
            tools[tool.name] = tool
    return tools


def _named_by(agent: AgentConfig, source: str) -> Sequence[type[Any]]:
    """Return the plugins behind a setting of the section that names others' servers or files; () without it.

    Raises:
        ConfigError: nothing installed reads it.
    """
    if not (setting := getattr(agent, source)):
        return ()
    # Loaded only if it is set: the import of MCP's client alone takes most of a second.
    return cast(
        Sequence[type[Any]], required("agentrl.plugin_sources", source, by=f"agent.{source}")(setting)
    )
