"""Supervised training: imitation of conversations, and reward models from pairs of answers."""
