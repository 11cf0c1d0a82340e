"""Plays one attempt through the real loop and shows it (`agentrl play`)."""
