"""Files to begin a plugin with (`agentrl new`)."""
