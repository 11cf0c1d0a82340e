"""Worlds that others built: their rows, partners and rewards (docs/hubs.md)."""
