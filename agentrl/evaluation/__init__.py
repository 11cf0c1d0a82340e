"""Evaluation of models, and validation during training."""
