"""`agentrl view --tui`: the table of attempts, and one attempt token by token, in a terminal."""
