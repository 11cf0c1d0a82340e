"""Trackers: Weights & Biases, TensorBoard, MLflow."""
