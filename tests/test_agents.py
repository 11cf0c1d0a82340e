"""The contract of every registered plugin: file, registered name and class agree, and each is what its base asks for."""

from __future__ import annotations

import inspect

import jsonschema
import pytest

from agentrl.errors import PluginError
from agentrl.plugins import AGENT_ALIASES, load_plugins, tools_for
from agentrl.rollout.shared_tools import validator
from agentrl.types import Message, Task

PLUGINS = load_plugins()
REGISTRIES = {"agents": PLUGINS.agents, "tools": PLUGINS.tools, "interactions": PLUGINS.interactions, "rewards": PLUGINS.rewards}
ALL = [(kind, name) for kind, registry in REGISTRIES.items() for name in registry.names()]


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_file_name_and_class_agree(kind, name):
    cls = REGISTRIES[kind].get(name)
    assert cls.name == name
    assert cls.__module__.rpartition(".")[2] == name
    assert cls.__name__.lower() == name.replace("_", "")
    assert inspect.getdoc(cls)


@pytest.mark.parametrize("name", PLUGINS.tools.names())
def test_a_tool_has_a_schema_of_its_arguments(name):
    tool = PLUGINS.tools.get(name)
    function = tool().schema()["function"]
    assert (function["name"], function["parameters"]["type"]) == (name, "object")
    assert function["description"]
    assert not validator(tool).is_valid("text instead of an object")


def test_a_tool_without_a_schema_is_named():
    broken = type("Broken", (PLUGINS.tools.get("calculator"),), {"name": "broken", "parameters": {"type": "objekt"}})
    with pytest.raises(PluginError, match="tool 'broken': `parameters` is no JSON schema") as caught:
        validator(broken)
    assert isinstance(caught.value.__cause__, jsonschema.SchemaError)


@pytest.mark.parametrize(("alias", "name"), AGENT_ALIASES.items())
def test_short_names_stand_for_agents(alias, name):
    assert PLUGINS.agents.get(alias) is PLUGINS.agents.get(name)


def test_only_agents_that_use_tools_are_offered_some():
    task = Task("t", "s", (Message("user", "q"),), "a", tools_kwargs={"calculator": {}, "mine": {}})
    offered = {name: tools_for(task, PLUGINS.agents.get(name), ("calculator",)) for name in PLUGINS.agents.names()}
    assert offered["tool_agent"] == ("calculator", "mine")
    assert offered["single_turn_agent"] == offered["interaction_agent"] == ()
