"""Plugins of another company."""
