"""Adapters for foreign plugins: MCP servers, and verl's tools and interactions."""
