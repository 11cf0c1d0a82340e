"""Rows to tasks, trajectories to Arrow, and the preparation of datasets."""
