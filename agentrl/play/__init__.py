"""One conversation, played through the real loop and shown (`agentrl play`)."""
