"""Plugins from elsewhere: the tools of MCP servers; and the registry with all plugins that a config names."""
