"""Pure functions from rewards and log-probabilities to losses."""
