"""The formats in which models write tool calls, and detection of the format that a chat template shows.

A format is a subclass of `ToolFormat`, an entry point of `agentrl.tool_formats` under its name.
"""

from __future__ import annotations

from functools import cache

from agentrl.chat.parsing import ToolFormat
from agentrl.config.model import TOOL_FORMATS
from agentrl.errors import ConfigError
from agentrl.registered import named, registered

NO_FORMAT = "none"
"""Format of a template that shows no tool calls: all sampled text is text or thought."""


@cache
def get_format(name: str) -> ToolFormat:
    """Return the format registered as `name`.

    Raises:
        PluginError: no package registers the name (the message lists the known ones), or its import fails.
        ConfigError: what is registered is no ToolFormat.
    """
    found = named("tool format", name, group=TOOL_FORMATS)
    if not (isinstance(found, type) and issubclass(found, ToolFormat)):
        raise ConfigError(
            f"tool format {name!r} is {found!r}, not a subclass of agentrl.chat.parsing.ToolFormat"
        )
    return found()


def detect_format(template: str) -> str:
    """Return the name of the format that a chat template shows; NO_FORMAT if it has no parser."""
    known = sorted(registered(TOOL_FORMATS), key=lambda name: (get_format(name).generality, name))
    return next((name for name in known if get_format(name).sign.search(template)), NO_FORMAT)
