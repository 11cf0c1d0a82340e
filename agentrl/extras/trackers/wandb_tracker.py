"""Sends records to Weights & Biases.

Mode `offline` writes to the run folder without a network (see `wandb sync`).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import wandb

from agentrl.errors import ConfigError
from agentrl.tracking.alarms import ALARMS_NAME, Alarm
from agentrl.tracking.attempt_table import COLUMNS, TABLE_NAME, SampledAttempts
from agentrl.tracking.metrics import StepRecord
from agentrl.tracking.tracker import TrackedRun

Mode = Literal["online", "offline", "disabled"]

INIT_TIMEOUT_S = 60
FINISH_TIMEOUT_S = 600.0
"""Time to send the remaining data at the end of a run; `wandb sync` sends the rest later."""
_ALARM_COLUMNS = ("step", "rule", "metric", "value", "bound", "advice")


class WandbTracker:
    """One wandb run per run folder: a resumed run continues with the same id, stored in `wandb_id.txt`."""

    def __init__(
        self, run_dir: Path, *, project: str, experiment: str, mode: Mode, config: Mapping[str, Any]
    ) -> None:
        """Start the run.

        Raises:
            ConfigError: mode is `online`, but there is no key.
            RuntimeError: the service cannot be reached.
        """
        if mode == "online" and not wandb.login(prompt=False):
            raise ConfigError(
                "tracking.wandb_mode=online needs a key: run `wandb login` or set WANDB_API_KEY, or use "
                "tracking.wandb_mode=offline"
            )
        try:
            self._run = wandb.init(
                project=project,
                name=experiment,
                id=_run_id(run_dir / "wandb_id.txt"),
                resume="allow",
                dir=str(run_dir),
                mode=mode,
                config=dict(config),
                settings=_settings(),
            )
        except wandb.Error as error:
            raise RuntimeError(str(error)) from error
        # A validation belongs to a step that training has already logged: wandb's own counter cannot go back.
        self._alarms: list[list[Any]] = []
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, record: StepRecord) -> None:
        """Send the finite values of one record."""
        self._run.log({**record.shown(), "step": record.step})

    def log_alarm(self, alarm: Alarm) -> None:
        """Send the alarm as one of wandb's alerts, which it can forward, and as a table of all so far."""
        self._alarms.append([alarm.step, alarm.rule, alarm.metric, alarm.value, alarm.bound, alarm.advice])
        table = wandb.Table(list(_ALARM_COLUMNS), data=self._alarms)
        self._run.log({ALARMS_NAME: table, "step": alarm.step})
        self._run.alert(f"alarm {alarm.rule}", alarm.line(), level="WARN")

    def log_attempts(self, table: SampledAttempts) -> None:
        """Send the table. wandb keeps one per validation."""
        data = [list(row.cells) for row in table.rows]
        self._run.log({TABLE_NAME: wandb.Table(list(COLUMNS), data=data), "step": table.step})

    def close(self) -> None:
        """Finish the run and end wandb's own process."""
        self._run.finish()


def _settings() -> wandb.Settings:
    # wandb would wrap the output streams and print banners into the live display.
    settings = wandb.Settings(console="off", silent=True, init_timeout=INIT_TIMEOUT_S)
    if hasattr(settings, "finish_timeout"):  # older versions wait forever at the end if the network is gone
        settings.finish_timeout = FINISH_TIMEOUT_S
    return settings


def _run_id(path: Path) -> str:
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()


def open_wandb(run: TrackedRun) -> WandbTracker:
    """Return the tracker of a run."""
    return WandbTracker(
        run.run_dir,
        project=run.project,
        experiment=run.experiment,
        mode=run.wandb_mode,
        config=run.config,
    )
