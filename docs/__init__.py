"""The pages of the documentation, packaged: `agentrl docs` reads them."""
