"""Tools that search texts."""
