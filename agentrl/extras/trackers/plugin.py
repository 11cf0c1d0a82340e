"""What this room registers: trackers."""

REGISTERS = {
    "agentrl.trackers": {
        "mlflow": "agentrl.extras.trackers.mlflow_tracker:MlflowTracker",
        "tensorboard": "agentrl.extras.trackers.tensorboard_tracker:TensorboardTracker",
        "wandb": "agentrl.extras.trackers.wandb_tracker:WandbTracker",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
