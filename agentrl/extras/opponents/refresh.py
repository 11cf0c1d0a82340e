"""Opponents that follow the policy: every few steps its weights become theirs
(`agent.opponents.NAME.refresh_steps`).

A *snapshot* is the policy after a step, exported to a folder that the opponents' servers read. Those that the
newest checkpoints need to resume from are kept.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from agentrl.cluster.frozen_servers import FrozenFleet, PolicySnapshot
from agentrl.cluster.workers import Workers
from agentrl.config.opponents import OpponentConfig, opponent_key
from agentrl.config.schema import Config
from agentrl.controller.checkpoint import complete_checkpoints
from agentrl.controller.listeners import FinishedStep, RunListener
from agentrl.controller.run_dir import RunDir
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.errors import DiskError
from agentrl.figures.trajectory_metrics import is_correct
from agentrl.learner.learner import Learner
from agentrl.types import SCORED_OUTCOMES
from agentrl.weights.pace import Pace

if TYPE_CHECKING:
    from agentrl.controller.run import Run

FOLDER = "opponents"
FIRST_VERSION = 0
"""Of an opponent that was never replaced."""
_NAME = re.compile(r"step_(\d{6,})_v(\d+)")


class OpponentRefresh:
    """Gives opponents the snapshots that are due.

    Args:
        folder: of the snapshots.
        published: version -> step of all policies that the run has published so far.
        checkpoints: returns the steps of the checkpoints that a run may resume from.
        timeout_s: deadline of one server's update, beside the time for its bytes.
    """

    def __init__(
        self,
        opponents: Mapping[str, OpponentConfig],
        frozen: FrozenFleet,
        *,
        folder: Path,
        published: Mapping[int, int],
        checkpoints: Callable[[], Collection[int]],
        timeout_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._intervals = _intervals(opponents)
        self._frozen = frozen
        self._folder = folder
        self._steps = {**published, FIRST_VERSION: 0}
        self._checkpoints = checkpoints
        self._pace = Pace(timeout_s)
        self._say = say
        self._current: dict[str, PolicySnapshot | None] = dict.fromkeys(self._intervals)

    def refresh(self, learner: Workers[Learner], *, step: int, version: int) -> None:
        """Replace the opponents that are due after `step` by the policy, whose version is `version`."""
        due = [name for name, interval in self._intervals.items() if step > 0 and step % interval == 0]
        if due and (snapshot := self._export(learner, step=step, version=version)) is not None:
            for name in due:
                self._replace(name, snapshot)
            self._remove_unneeded(step)

    def restore(self, learner: Workers[Learner], *, step: int, version: int) -> None:
        """Give all opponents the snapshots that they have after `step`, at a resume or after a recovery."""
        for name, interval in self._intervals.items():
            wanted = _last_due(step, interval)
            if wanted == 0:
                if self._current[name] is not None:  # back to a step before the first one
                    self._replace(name, None)
                continue
            snapshot = _find(self._folder, wanted)
            if snapshot is None:
                self._say(
                    f"opponent {name}: the snapshot of step {wanted} is not in {self._folder}; it gets the "
                    f"policy of step {step}"
                )
                snapshot = self._export(learner, step=step, version=version)
            if snapshot is not None:
                self._replace(name, snapshot)

    def metrics(self, batch: Sequence[AttemptFacts]) -> dict[str, float]:
        """Return the step of the policy that each opponent is (0: before the first refresh), and the results
        of the attempts of a batch by the opponent's version.

        `opponents/<name>/behind/<n>/` + `trajectories`, `accuracy`: of the attempts whose opponent was the
        policy `n` steps before that one. An attempt during which the opponent was replaced counts for the
        later policy.
        """
        values: dict[str, float] = {}
        for name, snapshot in self._current.items():
            step = 0 if snapshot is None else snapshot.step
            values[f"opponents/{name}/step"] = float(step)
            for former, results in sorted(self._by_step(name, batch).items(), reverse=True):
                prefix = f"opponents/{name}/behind/{step - former}/"
                values[f"{prefix}trajectories"] = float(len(results))
                values[f"{prefix}accuracy"] = mean(results)
        return values

    def _by_step(self, name: str, batch: Sequence[AttemptFacts]) -> dict[int, list[float]]:
        """Return step of the opponent's policy -> accuracy of each scored attempt in which it spoke."""
        found: dict[int, list[float]] = {}
        for attempt in batch:
            versions = dict(attempt.opponents).get(name, ())
            # Attempts of a resumed run may be older than this opponent, and have versions of other servers.
            step = self._steps.get(versions[-1]) if versions else None
            if step is not None and attempt.outcome in SCORED_OUTCOMES:
                found.setdefault(step, []).append(is_correct(attempt))
        return found

    def _export(self, learner: Workers[Learner], *, step: int, version: int) -> PolicySnapshot | None:
        folder = self._folder / f"step_{step:06d}_v{version}"
        self._steps[version] = step
        for former in self._folder.glob(f"step_{step:06d}_v*"):  # of a branch that the run left
            if former != folder:
                shutil.rmtree(former, ignore_errors=True)
        try:
            learner.run(Learner.export, str(folder))
        except DiskError as error:
            self._say(f"opponents stay as they are at step {step}: {error}")
            return None
        return _snapshot(folder)

    def _replace(self, name: str, snapshot: PolicySnapshot | None) -> None:
        num_bytes = 0
        if snapshot is not None:
            num_bytes = sum(file.stat().st_size for file in Path(snapshot.folder).glob("*.safetensors"))
        self._current[name] = snapshot
        self._frozen.replace(
            opponent_key(name),
            snapshot,
            timeout_s=self._pace.allowed_s(num_bytes),
            limit=self._pace.limit(num_bytes),
        )
        what = "its first weights" if snapshot is None else f"the policy of step {snapshot.step}"
        self._say(f"opponent {name} is {what}")

    def _remove_unneeded(self, step: int) -> None:
        """Remove snapshots that neither an opponent nor a checkpoint needs, nor one that is being written."""
        steps = {*self._checkpoints(), step, *(step - interval for interval in self._intervals.values())}
        needed = {_last_due(one, interval) for one in steps for interval in self._intervals.values()}
        for folder in self._folder.glob("step_*"):
            found = _NAME.fullmatch(folder.name)
            if found is not None and int(found[1]) not in needed:
                shutil.rmtree(folder, ignore_errors=True)


class OpponentListener(RunListener):
    """Brings the opponents of a run to the policy after each publish, or back to who they were."""

    def __init__(self, config: Config, run_dir: RunDir) -> None:
        self._config = config
        self._folder = run_dir.root / FOLDER

    def on_start(self, run: Run) -> None:
        self._refresh = OpponentRefresh(
            self._config.agent.opponents,
            run.frozen,
            folder=self._folder,
            published=run.dir.published(),
            checkpoints=lambda: [one.step for one in complete_checkpoints(run.dir.checkpoints)],
            timeout_s=self._config.rollout.weights.timeout_s,
            say=run.observer.say,
        )

    def on_publish(self, run: Run) -> None:
        # Before the first publish of a run, and after a recovery, nothing was learned.
        refresh = self._refresh.refresh if run.has_learned else self._refresh.restore
        refresh(run.roles.learner, step=run.step, version=run.version)

    def metrics(self, step: FinishedStep) -> Mapping[str, float]:
        return self._refresh.metrics(step.attempts)

    def needed(self, step: int) -> Sequence[Path]:
        return needed_snapshots(self._config.agent.opponents, self._folder, step)


def opponents(config: Config, run_dir: RunDir) -> RunListener | None:
    return OpponentListener(config, run_dir) if _intervals(config.agent.opponents) else None


def needed_snapshots(opponents: Mapping[str, OpponentConfig], folder: Path, step: int) -> list[Path]:
    """Return the snapshots in `folder` that a run resumed after `step` gives its opponents."""
    steps = {_last_due(step, interval) for interval in _intervals(opponents).values()}
    found = [_find(folder, one) for one in sorted(steps)]
    return [Path(snapshot.folder) for snapshot in found if snapshot is not None]


def _intervals(opponents: Mapping[str, OpponentConfig]) -> dict[str, int]:
    return {name: one.refresh_steps for name, one in opponents.items() if one.refresh_steps is not None}


def _last_due(step: int, interval: int) -> int:
    return step - step % interval


def _find(folder: Path, step: int) -> PolicySnapshot | None:
    return next((_snapshot(found) for found in folder.glob(f"step_{step:06d}_v*")), None)


def _snapshot(folder: Path) -> PolicySnapshot:
    found = _NAME.fullmatch(folder.name)
    assert found is not None, folder
    return PolicySnapshot(str(folder.resolve()), int(found[1]), int(found[2]))
