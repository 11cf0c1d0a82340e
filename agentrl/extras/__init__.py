"""Rooms that the core does without: what a command, a plugin's name, a scheme or a second server reaches."""
