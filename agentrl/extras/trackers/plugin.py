"""What this room registers: trackers."""

REGISTERS = {
    "agentrl.trackers": {
        "mlflow": "agentrl.extras.trackers.mlflow_tracker:open_mlflow",
        "tensorboard": "agentrl.extras.trackers.tensorboard_tracker:open_tensorboard",
        "wandb": "agentrl.extras.trackers.wandb_tracker:open_wandb",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
