"""Metrics, console, report."""
