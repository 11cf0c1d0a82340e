"""Config of tracking: what is shown and stored, and alarms on the metrics of a step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from agentrl.config.named_fields import NameIn
from agentrl.config.section import Section
from agentrl.config.service_fields import HttpURL, ServiceURI

TRACKERS = "agentrl.trackers"
"""Entry points: name -> function that opens a tracker (`agentrl.tracking.tracker.TrackedRun`)."""
TrackerName = Annotated[str, AfterValidator(NameIn("tracker", TRACKERS, also=("console",)))]


class AlarmsConfig(Section):
    """Bounds on what a step measures. Crossing one warns and keeps the groups concerned; it never ends a run.
    None: no such alarm.
    """

    min_entropy_share: float | None = Field(
        0.1, gt=0, lt=1, description="Minimum entropy, as a share of the entropy of the first steps."
    )
    min_ess: float | None = Field(
        0.3, gt=0, lt=1, description="Minimum effective sample size of the raw weights, as a share of tokens."
    )
    max_ratio: float | None = Field(
        10.0, gt=1, description="Maximum ratio of policy to proximal policy on a token."
    )
    max_length_change: float | None = Field(
        2.0,
        gt=1,
        description="Maximum factor by which the mean response length may grow or shrink compared with the "
        "first steps.",
    )
    max_logprob_gap: float | None = Field(
        0.2,
        gt=0,
        description="Maximum mean |policy - behavior| of the log-probabilities, in nats: learner against "
        "server, including staleness.",
    )
    max_moved: float | None = Field(
        0.05,
        gt=0,
        description="Maximum mean change of a token's log-probability per version, in nats: mean |policy - "
        "behavior| over mean lag, in steps with a mean lag of 0.5 or more.",
    )
    max_clip_share: float | None = Field(
        0.3, gt=0, lt=1, description="Maximum share of loss tokens that are clipped."
    )
    max_constant_groups: float | None = Field(
        0.9, gt=0, lt=1, description="Maximum share of groups whose rewards are all equal."
    )
    max_failed_share: float | None = Field(
        0.1,
        gt=0,
        lt=1,
        description="Maximum share of failed attempts, among all attempts and among those of each plugin. "
        "Retried attempts count.",
    )
    window_steps: int = Field(
        10, ge=1, description="Number of first and of latest steps that are averaged and compared."
    )
    dump_groups: int = Field(
        8,
        ge=0,
        description="Number of groups saved per alarm, as Parquet in alarms/ of the run directory; 0: none.",
    )


class SpansConfig(Section):
    """OpenTelemetry spans: one trace per attempt, with what it waited for (docs/operations.md)."""

    endpoint: HttpURL = Field(
        None,
        description="Base URL of a collector that takes OTLP over HTTP, such as http://localhost:4318; "
        "None: no spans.",
    )
    share: float = Field(1.0, gt=0, le=1, description="Share of attempts that get a trace, chosen at random.")
    contents: bool = Field(
        False,
        description="Add conversations and texts of failures to the traces, shortened. False: names, "
        "numbers and times only.",
    )
    max_queue: int = Field(
        20_000,
        ge=1,
        description="Spans per rollout actor that may wait for the collector. Attempts beyond are left out "
        "and counted.",
    )


class TrackingConfig(Section):
    """What is shown and kept."""

    wandb_mode: Literal["online", "offline", "disabled"] = Field(
        "offline", description="wandb's mode; offline needs no network."
    )
    mlflow_uri: ServiceURI = Field(
        None,
        description="MLflow's tracking URI; None: the environment's MLFLOW_TRACKING_URI, or else a database "
        "in the run directory, mlflow.db.",
    )
    attempts_per_validation: int = Field(
        16,
        ge=0,
        description="Attempts of each validation that wandb, tensorboard and MLflow show as a table, with "
        "shortened conversations; 0: none.",
    )
    report: bool = Field(True, description="Draw report.png during the run and at its end.")
    report_interval_s: float = Field(
        120.0,
        ge=0,
        description="Seconds between refreshes of report.png and summary.md during the run; 0: only at the "
        "end.",
    )
    baselines: dict[str, str] = Field(
        {}, description="Name -> model folder, validated before training and shown in the closing table."
    )
    token_ratios: bool = Field(
        False,
        description="Store the proximal log-probability of each trained token, so that `agentrl view` shows "
        "importance ratios: 4 bytes per token in proximal/ of the run directory. Each step then scores its "
        "batch before the update. Needs algorithm.mode=decoupled.",
    )
    alarms: AlarmsConfig = AlarmsConfig()
    spans: SpansConfig = SpansConfig()
