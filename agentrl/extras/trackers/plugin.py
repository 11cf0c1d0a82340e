"""What this room registers: trackers."""

REGISTERS = {
    "agentrl.trackers": {
        "mlflow": "agentrl.extras.trackers.openers:open_mlflow",
        "tensorboard": "agentrl.extras.trackers.openers:open_tensorboard",
        "wandb": "agentrl.extras.trackers.openers:open_wandb",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
