"""Inference servers: the embedded one, launching, supervision."""
