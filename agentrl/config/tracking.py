"""Config of tracking: what is shown and stored, and alarms on the metrics of a step."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl.config.section import Section


class AlarmsConfig(Section):
    """Bounds on what a step measures. Crossing one warns and keeps the groups concerned; it never ends a run. None: no such alarm."""

    min_entropy_share: float | None = Field(0.1, gt=0, lt=1, description="Lowest entropy, as a share of the first steps'.")
    min_ess: float | None = Field(0.3, gt=0, lt=1, description="Lowest effective sample size of the raw weights, a share of tokens.")
    max_ratio: float | None = Field(10.0, gt=1, description="Largest ratio of policy to proximal policy on a token.")
    max_length_change: float | None = Field(
        2.0, gt=1, description="Largest factor by which the mean response may grow or shrink against the first steps'."
    )
    max_logprob_gap: float | None = Field(
        0.2, gt=0, description="Largest mean |policy - behavior| log-probability, nats: server against learner, staleness included."
    )
    max_clip_share: float | None = Field(0.3, gt=0, lt=1, description="Largest share of loss tokens on which a clip decides.")
    max_constant_groups: float | None = Field(0.9, gt=0, lt=1, description="Largest share of groups whose rewards are all equal.")
    max_failed_share: float | None = Field(
        0.1,
        gt=0,
        lt=1,
        description="Largest share of attempts that fail: of all, and for each plugin of those that it took part in. Retried ones count.",
    )
    window_steps: int = Field(
        10, ge=1, description="Of what is compared with the first steps, so many are averaged there and so many of the latest."
    )
    dump_groups: int = Field(8, ge=0, description="Groups kept as Parquet in alarms/ of the run directory per alarm; 0: none.")


class TrackingConfig(Section):
    """What is shown and kept."""

    wandb_mode: Literal["online", "offline", "disabled"] = Field("offline", description="wandb's mode; offline needs no network.")
    report: bool = Field(True, description="Draw report.png at the end, and now and then before.")
    report_interval_s: float = Field(
        120.0, ge=0, description="Seconds between two refreshes of report.png and summary.md while the run goes on; 0: only at the end."
    )
    baselines: dict[str, str] = Field({}, description="Name -> model folder, validated before training and shown in the closing table.")
    alarms: AlarmsConfig = AlarmsConfig()
