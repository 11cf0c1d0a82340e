"""Config of the training loop: duration, frequencies and paths."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl.config.section import Section
from agentrl.config.storage_fields import LocalFolder, StorageURL
from agentrl.config.tracking import TrackerName

Verify = Literal["sample", "full"]
"""How much of a checkpoint is verified before it is read."""


class TrainerConfig(Section):
    """The run: how long, how often, where."""

    steps: int | None = Field(None, ge=1, description="Batches to train on; None: by total_epochs.")
    prepared_by: tuple[str, ...] = Field(
        (),
        description="Commands that create the files that this config reads, in order; printed if a file is "
        "missing.",
    )
    total_epochs: int = Field(1, ge=1, description="Passes over the training rows when `steps` is None.")
    save_freq: int = Field(-1, ge=-1, description="Checkpoint every N steps (and at the end); -1: never.")
    test_freq: int = Field(-1, ge=-1, description="Validate every N steps; -1: never.")
    val_before_train: bool = Field(
        True, description="Validate before the first step, if data.val_files is set."
    )
    val_only: bool = Field(False, description="Validate and stop.")
    resume_mode: str = Field(
        "auto",
        description="auto: from the newest checkpoint of the run directory; disable; or the path of a "
        "checkpoint.",
    )
    verify: Verify = Field(
        "sample",
        description="What is verified of a checkpoint before it is loaded. full: every byte, by all ranks in "
        "parallel. sample: sizes of all files, and the bytes of all but large shards, of which 64 MiB each.",
    )
    save_in_background: bool = Field(
        True,
        description="Continue training while a checkpoint is written; on a GPU, from a copy in the host's "
        "memory.",
    )
    keep_last: int = Field(3, ge=1, description="Number of newest checkpoints to keep.")
    keep_best: int = Field(
        0, ge=0, description="Number of additional checkpoints to keep: the best by `best_metric`; 0: none."
    )
    best_metric: str = Field(
        "val/reward_mean", description="Validation metric by which the best checkpoints are chosen."
    )
    best_mode: Literal["max", "min"] = Field(
        "max", description="Whether a larger or a smaller `best_metric` is better."
    )
    run_dir: LocalFolder = Field(
        None, description="Folder of the run; None: runs/<project_name>/<experiment_name>."
    )
    upload_to: StorageURL = Field(
        None,
        description="URL of a folder (s3://, gs://, file://) that gets a copy of the run in the background: "
        "finished checkpoints, the journal, trajectories, metrics, the policy. In a run folder without "
        "checkpoints, the same command resumes from there (agentrl docs storage). None: no copy.",
    )
    upload_interval_s: float = Field(
        30.0,
        gt=0,
        description="Seconds between searches for finished files to upload.",
    )
    project_name: str = Field("agentrl", description="Name of the project, for trackers.")
    experiment_name: str = Field("default", description="Name of the run.")
    logger: tuple[TrackerName, ...] = Field(
        ("console",), description="Trackers in addition to metrics.jsonl, which is always written."
    )
    rollout_data_dir: LocalFolder = Field(
        None,
        description="Folder for training trajectories as Parquet; None: trajectories/ of the run directory.",
    )
    validation_data_dir: LocalFolder = Field(
        None, description="Folder for validation trajectories; None: validation/ of the run directory."
    )
    keep_trajectories: bool = Field(True, description="Write trajectories.")
    seed: int = Field(0, ge=0, description="Seed of the data order, the initialization and the learner.")
    watchdog_s: float | None = Field(
        120.0,
        gt=0,
        description="Seconds without progress (no trajectory, batch, update or publish) after which the run "
        "reports what it waits for, also in watchdog/ of the run directory; choose more than the "
        "slowest attempt or update takes. None: never.",
    )
    profile_steps: tuple[int, ...] = Field(
        (),
        description="Steps (from 1) for which torch's profiler records the learner on every rank, in traces/ "
        "of the run directory.",
    )
