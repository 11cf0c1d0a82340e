"""Statistics, tables and pictures of runs and evaluations, from stored results alone."""
