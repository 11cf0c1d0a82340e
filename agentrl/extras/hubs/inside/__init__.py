"""Programs of hub processes. They run in the interpreter of another environment, without agentrl."""
