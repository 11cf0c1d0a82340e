"""Says that a collector does not take the spans of a run: once, because the run goes on without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from agentrl.config.tracking import SpansConfig


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
