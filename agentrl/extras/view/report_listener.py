"""The report of a run (`tracking.report`): refreshed while it runs, and drawn at its end."""

from __future__ import annotations

import shlex

from agentrl.config.schema import Config
from agentrl.controller.listeners import FinishedStep, Opened, RunListener
from agentrl.controller.observe import Observer
from agentrl.controller.run_dir import RunDir
from agentrl.extras.view.report_refresher import ReportRefresher


class ReportListener(RunListener):
    """Draws report.png, and says how to look at the run."""

    def __init__(self, config: Config, run_dir: RunDir) -> None:
        self._config = config
        self._folder = run_dir.root

    def on_open(self, opened: Opened) -> None:
        tracking = self._config.tracking
        self._observer: Observer = opened.observer
        interval_s = tracking.report_interval_s if tracking.report else 0.0
        self._refresher = ReportRefresher(self._folder, interval_s=interval_s, say=self._observer.say)

    def on_step(self, step: FinishedStep) -> None:
        self._refresher.consider()

    def on_finish(self) -> None:
        self._refresher.close()
        if self._config.tracking.report:
            self._observer.unwritten.attempt("report.png", self._draw)
        self._observer.say(f"look at it: agentrl view {shlex.quote(str(self._folder))}")

    def _draw(self) -> None:
        from agentrl.extras.view.run_picture import draw_report  # matplotlib takes a second to load

        drawn = draw_report(self._folder, max_staleness=self._config.buffer.max_staleness)
        self._observer.say(f"curves: {drawn}")

    def close(self, error: BaseException | None) -> None:
        self._refresher.close()
