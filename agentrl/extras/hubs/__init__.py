"""Worlds that others built: their rows, partners and rewards (agentrl/extras/hubs/README.md)."""
