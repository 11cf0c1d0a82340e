"""The schema of a run and its composition."""
