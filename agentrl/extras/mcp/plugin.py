"""What this room registers: tools of MCP servers."""

REGISTERS = {
    "agentrl.plugin_sources": {
        "mcp_servers": "agentrl.extras.mcp.tools:mcp_tools",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
