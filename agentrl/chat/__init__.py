"""Convert chat messages to tokens and back. Tokens are only ever appended."""
