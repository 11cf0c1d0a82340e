"""A listener that writes down what it is told, and adds a number to the record of each step."""

from collections.abc import Mapping

from agentrl.config.schema import Config
from agentrl.controller.listeners import FinishedStep, Opened, RunListener
from agentrl.controller.run import Run
from agentrl.controller.run_dir import RunDir


class Diary(RunListener):
    """One line per event."""

    def __init__(self, config: Config, run_dir: RunDir) -> None:
        self._file = run_dir.root / "diary.txt"

    def _write(self, line: str) -> None:
        with self._file.open("a") as file:
            file.write(f"{line}\n")

    def on_open(self, opened: Opened) -> None:
        self._write(f"open {opened.resumed_at}")

    def on_start(self, run: Run) -> None:
        self._write(f"start {run.step}")

    def on_begin(self, run: Run) -> None:
        self._write("begin")

    def on_publish(self, run: Run) -> None:
        self._write(f"publish {run.version}")

    def metrics(self, step: FinishedStep) -> Mapping[str, float]:
        return {"diary/attempts": float(len(step.attempts))}

    def on_step(self, step: FinishedStep) -> None:
        self._write(f"step {step.step}")

    def on_checkpoint(self, step: int) -> None:
        self._write(f"checkpoint {step}")

    def on_finish(self) -> None:
        self._write("finish")

    def on_end(self) -> None:
        self._write("end")

    def close(self, error: BaseException | None) -> None:
        self._write(f"close {error}")
