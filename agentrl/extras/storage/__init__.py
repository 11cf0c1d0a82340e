"""Object storage: inputs are fetched, finished files are sent."""
