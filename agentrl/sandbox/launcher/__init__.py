"""The process between the host and a program: a clean interpreter builds the walls, watches, kills, and reports.

Runs under `python -I -S` on the standard library alone and imports little of it: its start is part of every execution.
"""
