"""`agentrl play` names a mistake in a plugin or a row as `agentrl train` does."""

from pathlib import Path

from agentrl.errors import PluginError
from plugins.test_plugin_mistakes import ROW, TOOL, USE_TOOL, command, write
from plugins.test_plugin_mistakes import here as here
from plugins.test_plugin_mistakes import models as models


def test_a_tool_that_is_not_async():
    Path("mine.py").write_text(TOOL.replace("async def call", "def call"))
    result = command("play", "config.yaml", *USE_TOOL)
    assert isinstance(result.exception, PluginError)
    assert str(result.exception) == (
        "agent.tools: tool 'shout' (mine.py:8): `call` is not async: write `async def call`"
    )


def test_a_tool_that_does_not_exist():
    write({**ROW, "extra_info": {"tools_kwargs": {"calculater": {}}}})
    played = command("play", "config.yaml")
    assert isinstance(played.exception, PluginError)
    assert str(played.exception).startswith("rows:0: unknown tool 'calculater'")
