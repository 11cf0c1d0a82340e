"""The schema of a run's config, and its composition from files and overrides."""
