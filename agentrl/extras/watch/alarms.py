"""Alarms (`tracking.alarms`): one line for each, and a file with the groups that it concerns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentrl.config.schema import Config
from agentrl.controller.listeners import FinishedStep, Opened, RunListener
from agentrl.controller.observe import Observer
from agentrl.controller.run_dir import RunDir
from agentrl.extras.watch.rules import AlarmRule, Alarms, evidence, rules_from
from agentrl.tracking.alarms import Alarm


class AlarmListener(RunListener):
    """Compares the record of each step with the rules."""

    def __init__(self, config: Config, run_dir: RunDir) -> None:
        self._options = config.tracking.alarms
        self._folder = run_dir.root
        self._raised: Sequence[tuple[AlarmRule, Alarm]] = ()

    def on_open(self, opened: Opened) -> None:
        self._observer: Observer = opened.observer
        self._begin()

    def _begin(self) -> None:
        self._alarms = Alarms(
            rules_from(self._options),
            window_steps=self._options.window_steps,
            file=self._folder / "alarms.jsonl",
            kept=self._observer.trackers.metrics.kept,
        )

    def on_rollback(self, step: int) -> None:
        self._alarms.close()
        self._observer.unwritten.attempt("alarms.jsonl", self._begin)

    def on_values(self, step: FinishedStep, values: Mapping[str, float]) -> Mapping[str, float]:
        self._raised = self._alarms.observe(step.step, values)
        return {"alarms/raised": float(self._alarms.num_raised)}

    def on_step(self, step: FinishedStep) -> None:
        for rule, alarm in self._raised:
            kept = evidence(step.groups, rule, limit=self._options.dump_groups)
            if kept:
                path = self._folder / "alarms" / f"step_{step.step:06d}_{rule.name}.parquet"
                attempts = [attempt for group in kept for attempt in group.attempts]
                self._observer.recording.write(path, attempts, step=step.step)
            self._observer.say(alarm.line())
            self._observer.trackers.log_alarm(alarm)
        self._observer.unwritten.attempt("alarms.jsonl", self._alarms.write)
