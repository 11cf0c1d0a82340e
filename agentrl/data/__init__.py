"""Reading rows as tasks, trajectories in Arrow format, and preparation of datasets."""
