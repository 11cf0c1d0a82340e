"""Building of datasets, and import of models."""
