"""`Observer`: what a run records and displays: metrics, console, trajectories, and what listeners add."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial

from agentrl.config.schema import Config
from agentrl.controller.closing import closing_of
from agentrl.controller.listeners import FinishedStep, Listeners
from agentrl.controller.recording import LocalRecording, Recording
from agentrl.controller.run_dir import RunDir
from agentrl.data.atomic_files import write_atomically
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.failures import FailureBook
from agentrl.figures.trajectory_metrics import constant_group_share, summarise_attempts
from agentrl.rollout.loop_gaps import gap_metrics
from agentrl.tracking.attempt_table import SampledAttempts
from agentrl.tracking.attempts import AttemptCounts, FailedAttempt
from agentrl.tracking.closing_table import write_summary
from agentrl.tracking.console import validation_text
from agentrl.tracking.metrics import PhaseTimer, read_metrics
from agentrl.tracking.recent_rate import RecentRate
from agentrl.tracking.seals import LINE_FILES, last_checksum, sealed_document
from agentrl.tracking.tracker import open_trackers
from agentrl.types import BufferCounts, Group, SendTimes, Trajectory

_NOTHING_PUBLISHED: Mapping[str, float] = {"bytes": 0.0}
_NOTHING_PLAYED: Mapping[str, float] = {}
_BECAME = ("retried", "replaced", "masked", "left_out", "dropped_groups", "withdrawn_groups")
MIN_LAG_OF_MOVEMENT = 0.5
BOXES_OPEN = "boxes_open"
_NO_CURRICULUM: Mapping[str, float] = {}


class Observer:
    """Records and displays the run. Nothing here influences the training."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        *,
        resumed_at: int | None,
        listeners: Listeners | None = None,
    ) -> None:
        self._config = config
        self._listeners = listeners or Listeners()
        self._dir = run_dir
        self.trackers = open_trackers(
            config.trainer.logger,
            wandb_mode=config.tracking.wandb_mode,
            mlflow_uri=config.tracking.mlflow_uri,
            run_dir=run_dir.root,
            project=config.trainer.project_name,
            experiment=config.trainer.experiment_name,
            resolved_config=config.model_dump(mode="json"),
            total_steps=config.trainer.steps,
            restored_step=resumed_at,
        )
        self.unwritten = self.trackers.unwritten
        self.recording: Recording = LocalRecording(self.unwritten)
        self.failures = FailureBook(
            run_dir.root,
            say=self.say,
            unwritten=self.unwritten,
            is_resumed=resumed_at is not None,
            shows_tracebacks=bool(os.environ.get("AGENTRL_DEBUG")),
        )
        self._attempts = self._recorded_attempts = AttemptCounts()
        self.timer = PhaseTimer(on_phase=self.trackers.console.set_phase)
        self._last_rollout = _NOTHING_PLAYED
        self._sampling = RecentRate(0.0)
        self._published = _NOTHING_PUBLISHED

    def go_back(self, step: int) -> None:
        """Drop the records after `step`: those steps are repeated."""
        self.trackers.go_back(step)

    def say(self, text: str) -> None:
        """Show a message on the console."""
        self.trackers.console.say(text)

    def set_total_steps(self, total_steps: int) -> None:
        self.trackers.console.set_total_steps(total_steps)

    def set_servers(self, states: Mapping[str, str]) -> None:
        """Show the servers. states: URL -> state."""
        self.trackers.console.set_servers(states)

    def count_published(self, num_bytes: int, times: SendTimes | None) -> None:
        """Add a publish to the current step: bytes sent to all servers together, and times on the learner."""
        own = {"bytes": float(num_bytes), **(asdict(times) if times is not None else {})}
        self._published = {
            name: self._published.get(name, 0.0) + own.get(name, 0.0) for name in {**self._published, **own}
        }

    def attempts(self, counts: AttemptCounts, failed: Sequence[FailedAttempt], *, step: int) -> None:
        """Record counts of training attempts since the run's start, and failures since the last call."""
        self._attempts = counts
        self.failures.add(failed, step=step)

    def begin_steps(self, rollout_stats: Mapping[str, float] = _NOTHING_PLAYED) -> None:
        """Reset times, publishes and counters: start-up and first validations count toward no step."""
        self.timer.finish_step()
        self._published = _NOTHING_PUBLISHED
        self._last_rollout = rollout_stats
        self._sampling = RecentRate(rollout_stats.get("sampled_tokens", 0.0))

    # -------------------------------------------------------------------------------------------------- steps

    def step(self, step: FinishedStep) -> None:
        """Record a finished step; counters are recorded as their increase over the step."""
        rollout_stats = step.rollout_stats
        times = self.timer.finish_step()
        growth = {name: value - self._last_rollout.get(name, 0.0) for name, value in rollout_stats.items()}
        self._last_rollout = dict(rollout_stats)
        ended = self._attempts - self._recorded_attempts
        self._recorded_attempts = self._attempts
        step_s = max(times["time/step_s"], 1e-9)
        values = {
            **summarise_attempts(step.attempts, lags=step.lags, prefix="rollout/"),
            **_greedy(step.groups),
            "rollout/constant_groups": constant_group_share(step.groups),
            **{f"learner/{name}": value for name, value in _combine(step.updates).items()},
            **times,
            **{f"buffer/{name}": value for name, value in step.buffer_stats.items()},
            **{f"curriculum/{name}": value for name, value in step.curriculum.items()},
            "speed/sampled_tokens_per_s": self._sampling.after(
                step_s, total=rollout_stats.get("sampled_tokens", 0.0)
            ),
            "speed/trajectories_per_s": growth.get("finished", 0.0) / step_s,
            "idle/learner": times.get("time/take_s", 0.0) / step_s,
            "idle/servers": min(1.0, growth.get("idle_s", 0.0) / step_s / self._config.rollout.num_actors),
            "rollout/in_flight": rollout_stats.get("in_flight", 0.0),
            "rollout/stuck_threads": rollout_stats.get("stuck_threads", 0.0),
            "rollout/interruptions": growth.get("num_interruptions", 0.0),
            "rollout/server_failures": growth.get("server_failures", 0.0),
            "rollout/servers_drained": growth.get("servers_drained", 0.0),
            "rollout/redone_share": growth.get("redone_tokens", 0.0)
            / max(growth.get("prefilled_tokens", 0.0), 1.0),
            **{f"rollout/{name}": growth.get(name, 0.0) for name in _BECAME},
            **{f"spans/{name[6:]}": value for name, value in growth.items() if name.startswith("spans_")},
            **{f"pace/{name[5:]}": value for name, value in growth.items() if name.startswith("pace_")},
            **_box_metrics(growth, rollout_stats),
            **ended.metrics(),
            **{f"rollout/loop_gap_s/{name}": value for name, value in gap_metrics(growth).items()},
            **{f"publish/{name}": value for name, value in self._published.items()},
            "trainer/unwritten_files": float(self.unwritten.take_count()),
            **self._listeners.metrics(step),
        }
        values |= _movement(values)
        self._published = _NOTHING_PUBLISHED
        values |= self._listeners.on_values(step, values)
        self.trackers.write("train", step=step.step, version=step.version, values=values)
        if self._config.trainer.keep_trajectories:
            file = self._dir.rollout_data / f"step_{step.step:06d}.parquet"
            played = [attempt for group in step.groups for attempt in group.attempts]
            self.recording.write(file, played, step=step.step, learned_by=step.learned_by)
        self._listeners.tell(lambda one: one.on_step(step))

    def validation(
        self, step: int, version: int, metrics: Mapping[str, float], *, baseline: str | None
    ) -> None:
        """Record a validation. A baseline's is only shown, because it is no point of the run's curve."""
        if baseline is None:
            self.trackers.write("validation", step=step, version=version, values=metrics)
        else:
            self.say(f"validation of {baseline}: {validation_text(metrics)}")

    def sample_attempts(self, attempts: Sequence[Trajectory], *, step: int, version: int) -> None:
        """Send a table of some attempts of a validation to the trackers."""
        limit = self._config.tracking.attempts_per_validation
        if limit and self.trackers.names:
            self.trackers.log_attempts(SampledAttempts.of(attempts, step=step, version=version, limit=limit))

    # ---------------------------------------------------------------------------------------------------- end

    def finish(
        self, results: Mapping[str, Mapping[str, float]], *, step: int, version: int, counts: BufferCounts
    ) -> None:
        """Write result.json and summary.md, and show the closing table."""
        self.recording.finish()
        result = {
            "step": step,
            "version": version,
            "counts": asdict(counts),
            "balanced": counts.is_balanced,
            "validation": results,
            "ends": {name: last_checksum(self._dir.root / name) for name in LINE_FILES},
        }
        self.unwritten.attempt(
            "result.json",
            partial(write_atomically, self._dir.root / "result.json", sealed_document(result)),
        )
        self.failures.write(is_last=True)
        records = read_metrics(self.trackers.metrics.path) if self.trackers.metrics.path.exists() else []
        table = closing_of(
            results,
            step=step,
            version=version,
            counts=counts,
            records=records,
            failures=self.failures.lines(),
        )
        summary = partial(write_summary, table, self._dir.root / "summary.md", title=str(self._dir.root))
        self.unwritten.attempt("summary.md", summary)
        self.trackers.console.show_closing(table)

    def close(self) -> None:
        self.failures.write(is_last=True)
        self.trackers.close()


def _greedy(groups: Sequence[Group[AttemptFacts]]) -> dict[str, float]:
    rewards = [group.greedy.reward for group in groups if group.greedy is not None]
    return {"rollout/greedy_reward_mean": sum(rewards) / len(rewards)} if rewards else {}


def _box_metrics(growth: Mapping[str, float], rollout_stats: Mapping[str, float]) -> dict[str, float]:
    """Return what boxes did during the step, and how many are open; {} for a run without boxes."""
    if BOXES_OPEN not in rollout_stats:
        return {}
    counted = {
        name: value for name, value in growth.items() if name.startswith("boxes_") and name != BOXES_OPEN
    }
    named = {f"boxes/{name.removeprefix('boxes_')}": value for name, value in counted.items()}
    return {**named, "boxes/open": rollout_stats[BOXES_OPEN]}


def _movement(values: Mapping[str, float]) -> dict[str, float]:
    """Return by how many nats the log-probability of a token changes per version of lag, in the mean.

    Empty if most tokens are fresh: the rounding of servers and learner would count as movement.
    """
    lag, gap = values.get("rollout/lag/mean", 0.0), values.get("learner/mismatch_mean")
    return {} if gap is None or lag < MIN_LAG_OF_MOVEMENT else {"learner/moved_per_version": gap / lag}


def _combine(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Reduce the metrics of several updates to one value each: maxima, sums of counts, means of the rest."""
    names = dict.fromkeys(name for update in updates for name in update)
    return {name: _one(name, [update[name] for update in updates if name in update]) for name in names}


def _one(name: str, values: Sequence[float]) -> float:
    _, _, own_name = name.rpartition("/")  # metrics of the critic have the prefix `critic/`
    # `non_finite_updates` counts from the start of the process.
    if name.endswith("_max") or own_name == "non_finite_updates":
        return max(values)
    if own_name.startswith("num_") or own_name == "is_skipped":
        return sum(values)
    return sum(values) / len(values)
