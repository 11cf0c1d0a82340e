"""Validation during training: all rows of val_files, on the servers of the run, with the `eval` sampling."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.evaluation import EvalConfig
from agentrl.controller.examine import examined
from agentrl.controller.rollouts import RolloutFleet
from agentrl.data.dataset import Dataset
from agentrl.data.trajectories import encode, write_parquet
from agentrl.tracking.summary import summarise_trajectories
from agentrl.types import Lease, Trajectory

if TYPE_CHECKING:
    from agentrl.controller.run import Run


class Validation:
    """Plays every validation row `eval.n` times and says how it went. The ledger knows nothing of these groups."""

    def __init__(self, dataset: Dataset, config: EvalConfig, *, folder: Path | None, num_examine: int) -> None:
        self._dataset = dataset
        self._config = config
        self._folder = folder
        self._num_examine = num_examine

    def run(self, run: Run, *, step: int, version: int, baseline: str | None = None) -> Mapping[str, float]:
        """Play, record and return the metrics; they carry the prefix `val/`."""
        leases = [Lease(row, self._dataset.task(row), self._config.n, version) for row in range(len(self._dataset))]
        results = run.wait(run.rollouts.start_play(leases), timeout_s=self._config.timeout_s, who="validation")
        trajectories: list[Trajectory] = []
        for result in results:
            assert isinstance(result, bytes)
            trajectories += RolloutFleet.collect(result)
        tasks = [leases[trajectory.group_id].task for trajectory in trajectories]
        if run.batch_rewards.is_any:
            trajectories = run.batch_rewards.score_validation(tasks, trajectories)
        for text in examined(tasks, trajectories, self._num_examine):
            run.observer.say(text)
        metrics = summarise_trajectories(trajectories, version=None, prefix="val/")
        run.observer.validation(step, version, metrics, baseline=baseline)
        if self._folder is not None:
            name = f"baseline_{baseline}" if baseline else f"step_{step:06d}"
            write_parquet(self._folder / f"{name}.parquet", encode(trajectories), step=step)
        return metrics
