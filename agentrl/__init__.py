"""Asynchronous reinforcement learning of language-model agents that use tools over many turns."""
