"""Opponents that follow the policy."""
