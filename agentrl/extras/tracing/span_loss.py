"""Says that a collector does not take the spans of a run: once, because the run goes on without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from agentrl.config.schema import Config
from agentrl.config.tracking import SpansConfig
from agentrl.controller.listeners import FinishedStep, RunListener
from agentrl.controller.run_dir import RunDir

if TYPE_CHECKING:
    from agentrl.controller.run import Run


class SpanLoss:
    """Watches the counters of spans. problem: asks the rollout actors why spans were lost."""

    def __init__(
        self, config: SpansConfig, *, problem: Callable[[], str], say: Callable[[str], None]
    ) -> None:
        self._config = config
        self._problem = problem
        self._say = say
        self._has_said = False

    def look(self, rollout_stats: Mapping[str, float]) -> None:
        """Report the first spans that were lost or left out."""
        lost, left_out = (rollout_stats.get(name, 0.0) for name in ("spans_lost", "spans_left_out"))
        if self._has_said or not (lost or left_out):
            return
        self._has_said = True
        why = self._problem() if lost else f"tracking.spans.max_queue={self._config.max_queue} spans waited"
        self._say(
            f"spans: {lost + left_out:.0f} did not reach {self._config.endpoint} ({why}); the run goes on, "
            "and spans/lost and spans/left_out count them"
        )


class SpanLossListener(RunListener):
    """Watches the spans of a run."""

    def __init__(self, config: Config, run_dir: RunDir) -> None:
        self._config = config.tracking.spans

    def on_start(self, run: Run) -> None:
        self._loss = SpanLoss(self._config, problem=run.rollouts.span_problem, say=run.observer.say)

    def on_step(self, step: FinishedStep) -> None:
        self._loss.look(step.rollout_stats)
