"""Trackers and pictures load only what they need."""

import pytest

from tracking.test_metrics import check_what_is_loaded


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        (
            "extras.view.run_picture extras.trackers.tensorboard_tracker extras.trackers.wandb_tracker",
            "torch ray tensorflow",
        ),
        ("extras.trackers.mlflow_tracker", "torch ray tensorflow wandb"),
    ],
)
def test_trackers_load_only_what_they_need(modules, forbidden):
    check_what_is_loaded(modules, forbidden)
