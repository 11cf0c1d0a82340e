"""Judges and partners that are models or services behind a URL."""
