"""What an MCP server says of its tools is shown safely."""

import types

import pytest
from mcp.types import Tool as ListedTool

from agentrl.errors import PluginError
from agentrl.extras.mcp.tools import tool_class
from agentrl.terminal_text import CONTROL

RED = "\x1b[31mred\x1b[0m"
TITLE = "\x1b]0;owned\x07"


def listed(**changes):
    told = {
        "name": "find",
        "description": "Finds.",
        "inputSchema": {"type": "object", "properties": {"q": {"type": "string"}}},
    }
    return ListedTool.model_validate(told | changes)


SERVER = types.SimpleNamespace(name="notes", prefix="notes_")


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("name", {"name": f"find{RED}"}),
        ("name", {"name": "find\nall"}),
        ("name", {"name": "find\u202ednif"}),
        ("description", {"description": f"Finds.{TITLE}"}),
        ("title", {"title": RED}),
        ("schema", {"inputSchema": {"type": "object", "properties": {f"q{RED}": {"type": "string"}}}}),
        (
            "schema",
            {
                "inputSchema": {
                    "type": "object",
                    "properties": {"q": {"type": "string", "enum": ["a", "\x9b31m"]}},
                }
            },
        ),
    ],
)
def test_an_mcp_tool_with_control_characters_is_refused(what, changes):
    with pytest.raises(
        PluginError, match=f"MCP server 'notes': the {what} of tool .* contains control characters"
    ) as caught:
        tool_class(SERVER, listed(**changes))
    assert not CONTROL.search(str(caught.value))


def test_an_mcp_tool_may_have_lines_and_any_script():
    made = tool_class(SERVER, listed(name="suche", description="Findet\r\n\tdies\nund – 検索"))
    assert made.description == "Findet\r\n\tdies\nund – 検索"
