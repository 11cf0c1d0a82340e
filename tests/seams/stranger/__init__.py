"""A package of somebody else: each module adds one thing to agentrl, by the entry points beside it."""
