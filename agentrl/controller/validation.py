"""Validation during training: all rows of val_files, on the servers of the run, with the `eval` sampling.

It measures one version: the driver publishes nothing during a validation, and a server that joins meanwhile
gets the same version before it serves. An attempt with a token of another version counts as failed.

It ends after `eval.timeout_s` at the latest. Attempts that have not ended by then, or whose rollout actor
died, count as failed with their reason; the run continues.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Protocol

from ray import ObjectRef

from agentrl.cluster.rollouts import RolloutFleet
from agentrl.config.evaluation import EvalConfig
from agentrl.controller.batch_scorer import RemoteBatchRewards
from agentrl.controller.batches import traced_batch
from agentrl.controller.observe import Observer
from agentrl.data.dataset import Dataset
from agentrl.data.trajectories import encode, write_parquet
from agentrl.figures.attempts import attempt_of
from agentrl.figures.summary import summarise
from agentrl.figures.trajectory_metrics import summarise_trajectories
from agentrl.figures.validation_metrics import figures
from agentrl.rollout.player import unplayed
from agentrl.rollout.recorder import Attempt
from agentrl.rollout.scoring import DETAILS
from agentrl.tracking.attempts import FailedAttempt
from agentrl.tracking.conversation_text import message_lines
from agentrl.types import SCORED_OUTCOMES, Failure, Lease, Outcome, Task, Trajectory

GRACE_S = 60.0
"""Rollout actors stop by themselves at the deadline; this long after it, a silent actor is given up."""
RULE = "-" * 80


class Host(Protocol):
    """The parts of a run that a validation uses."""

    observer: Observer
    rollouts: RolloutFleet

    def wait(self, refs: Sequence[ObjectRef], *, timeout_s: float) -> list[ObjectRef]:
        """Wait up to `timeout_s` for results of rollout actors; return those that are ready."""
        ...


class Validation:
    """Plays every validation row `eval.n` times and returns metrics. These groups are not in the ledger."""

    def __init__(
        self,
        dataset: Dataset,
        config: EvalConfig,
        *,
        rewards: RemoteBatchRewards,
        folder: Path | None,
        num_examine: int,
    ) -> None:
        """`rewards`: of scope batch, for validation.

        `folder`: stores the trajectories; None: they are not kept.
        """
        self._dataset = dataset
        self._config = config
        self._rewards = rewards
        self._folder = folder
        self._num_examine = num_examine

    def run(self, host: Host, *, step: int, version: int, baseline: str | None = None) -> Mapping[str, float]:
        """Play, score and record all rows; return the metrics, with the prefix `val/`."""
        leases = [
            Lease(row, self._dataset.task(row), self._config.n, version) for row in range(len(self._dataset))
        ]
        trajectories = [of_version(trajectory, version) for trajectory in self._play(host, leases)]
        tasks = [leases[trajectory.group_id].task for trajectory in trajectories]
        if self._rewards.is_any:
            with traced_batch(host.rollouts, "validation", step=step, num_attempts=len(tasks)):
                trajectories = self._rewards.score_validation(tasks, trajectories)
        failed = [
            FailedAttempt.of(t, became="not_scored", version=version)
            for t in trajectories
            if t.outcome not in SCORED_OUTCOMES
        ]
        host.observer.failures.add(failed, step=step)
        for text in examined(tasks, trajectories, self._num_examine):
            host.observer.say(text)
        metrics = summarise_trajectories(trajectories, lags=None, prefix="val/")
        metrics |= figures(summarise([attempt_of(trajectory) for trajectory in trajectories]), prefix="val/")
        host.observer.validation(step, version, metrics, baseline=baseline)
        if baseline is None:
            host.observer.sample_attempts(trajectories, step=step, version=version)
        if self._folder is not None:
            name = f"baseline_{baseline}" if baseline else f"step_{step:06d}"
            write = partial(write_parquet, self._folder / f"{name}.parquet", encode(trajectories), step=step)
            host.observer.unwritten.attempt("validation", write)
        return metrics

    def _play(self, host: Host, leases: Sequence[Lease]) -> list[Trajectory]:
        """Return an attempt per member of each lease, as failed if its actor was lost."""
        shares = host.rollouts.start_play(leases)
        in_time = set(host.wait(list(shares), timeout_s=self._config.timeout_s + GRACE_S))
        trajectories: list[Trajectory] = []
        for result, share in shares.items():
            played = host.rollouts.collect(result) if result in in_time else None
            if played is None:
                why = (
                    "died"
                    if result in in_time
                    else f"had not responded at the end of eval.timeout_s={self._config.timeout_s:g}"
                )
                played = lost(share, Failure(f"the rollout actor that played it {why}"))
                host.observer.say(f"validation lost {len(played)} attempts: {played[0].failure}")
            trajectories += played
        return trajectories


def lost(leases: Sequence[Lease], failure: Failure) -> list[Trajectory]:
    """Return all attempts of `leases` as failed."""
    attempts = (
        Attempt(lease.group_id, member, lease.task) for lease in leases for member in range(lease.group_size)
    )
    return [unplayed(attempt, Outcome.ABORTED, failure) for attempt in attempts]


def of_version(trajectory: Trajectory, version: int) -> Trajectory:
    """Return the trajectory; as failed if any of its tokens was sampled by another version than `version`."""
    others = set(trajectory.versions[trajectory.action_mask].tolist()) - {version}
    if not others:
        return trajectory
    failure = (
        f"validation of version {version} contains tokens sampled by other versions: "
        f"{', '.join(map(str, sorted(others)))}"
    )
    return trajectory.replace(outcome=Outcome.ABORTED, failure=Failure(failure), rewards=())


def examined(tasks: Sequence[Task], trajectories: Sequence[Trajectory], count: int) -> Iterator[str]:
    """Yield at most `count` scored attempts as text, alternating between the data sources."""
    by_source: dict[str, list[str]] = {}
    for task, trajectory in zip(tasks, trajectories, strict=True):
        texts = by_source.setdefault(trajectory.data_source, [])
        if trajectory.outcome in SCORED_OUTCOMES and len(texts) < count:
            texts.append(describe(task, trajectory))
    in_turn = (text for texts in zip_longest(*by_source.values()) for text in texts if text is not None)
    yield from (text for text, _ in zip(in_turn, range(count), strict=False))


def describe(task: Task, trajectory: Trajectory) -> str:
    """Return an attempt in full: messages, ground truth, reward events, rewards' metrics and details."""
    lines = [
        RULE,
        f"{trajectory.task_id} ({trajectory.data_source}, {trajectory.agent_name}, "
        f"{trajectory.outcome.value})",
    ]
    lines += [part for message in trajectory.messages for part in message_lines(message)]
    lines.append(f"[ground truth] {task.ground_truth}")
    lines += [
        f"[reward] {event.name}: {event.value:g} on token {event.position}" for event in trajectory.rewards
    ]
    lines += [
        f"[{name}] {value:g}"
        for name, value in sorted(trajectory.metrics.items())
        if name.startswith("reward/")
    ]
    for name, details in trajectory.extra_info.get(DETAILS, {}).items():
        lines += [f"[reward/{name}/{key}] {value}" for key, value in details.items()]
    return "\n".join([*lines, f"[sum] {trajectory.reward:g}", RULE])
