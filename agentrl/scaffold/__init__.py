"""Templates for new plugins (`agentrl new`)."""
