"""A tracker that writes the reward of each step into a text file."""

from agentrl.tracking.alarms import Alarm
from agentrl.tracking.attempt_table import SampledAttempts
from agentrl.tracking.metrics import StepRecord
from agentrl.tracking.tracker import TrackedRun


class TextTracker:
    """One line per step."""

    def __init__(self, run: TrackedRun) -> None:
        self._file = (run.run_dir / "rewards.txt").open("a")

    def log(self, record: StepRecord) -> None:
        if record.kind == "train":
            self._file.write(f"{record.step} {record.values['rollout/reward_mean']}\n")

    def log_alarm(self, alarm: Alarm) -> None: ...

    def log_attempts(self, table: SampledAttempts) -> None: ...

    def close(self) -> None:
        self._file.close()
