"""The process between the host and a program: it builds the walls, watches, kills, and reports.

It runs under `python -I -S` with the standard library alone and imports little: each execution pays for its
start.
"""
