"""Checkpoints as models that transformers and servers load."""
