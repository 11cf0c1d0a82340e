"""Other people's plugins in our form: MCP servers, verl's tools and interactions."""
