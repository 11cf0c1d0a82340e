"""The embedded server: SGLang's native protocol on transformers' continuous batching, for machines without
SGLang.
"""
