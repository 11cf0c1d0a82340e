"""How each tracker is opened. Its package is imported only then."""

from __future__ import annotations

from agentrl.extras.trackers.background import BackgroundTracker
from agentrl.tracking.tracker import TrackedRun, Tracker


def open_wandb(run: TrackedRun) -> Tracker | None:
    """Return the tracker; None with `tracking.wandb_mode=disabled`."""
    if run.wandb_mode == "disabled":
        return None
    from agentrl.extras.trackers.wandb_tracker import WandbTracker

    return WandbTracker(
        run.run_dir,
        project=run.project,
        experiment=run.experiment,
        mode=run.wandb_mode,
        config=run.config,
    )


def open_tensorboard(run: TrackedRun) -> Tracker:
    from agentrl.extras.trackers.tensorboard_tracker import TensorboardTracker

    return TensorboardTracker(run.run_dir / "tensorboard", config=run.config, restored_step=run.restored_step)


def open_mlflow(run: TrackedRun) -> Tracker:
    """Return the tracker, in a thread of its own: a server may be slow."""
    from agentrl.extras.trackers.mlflow_tracker import MlflowTracker

    return BackgroundTracker(
        MlflowTracker(
            run.run_dir,
            uri=run.mlflow_uri,
            project=run.project,
            experiment=run.experiment,
            config=run.config,
            restored_step=run.restored_step,
        )
    )
