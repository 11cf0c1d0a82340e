"""Writes TensorBoard event files with tensorboard's own writer: torch.utils.tensorboard would load torch."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from agentrl.tracking.alarms import ALARMS_NAME, Alarm
from agentrl.tracking.attempt_table import TABLE_NAME, SampledAttempts
from agentrl.tracking.metrics import StepRecord
from agentrl.tracking.tracker import TrackedRun


class TensorboardTracker:
    """Writes one event file per start of the run, all to one folder; TensorBoard joins them."""

    def __init__(self, folder: Path, *, config: Mapping[str, Any], restored_step: int | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))
        if restored_step is not None:
            self.go_back(restored_step)
        self._add(
            restored_step or 0, _text("config", f"```json\n{json.dumps(config, indent=2, default=str)}\n```")
        )

    def log(self, record: StepRecord) -> None:
        """Write the finite values of one record and flush them."""
        shown = record.shown().items()
        self._add(record.step, *(Summary.Value(tag=name, simple_value=value) for name, value in shown))
        self._writer.flush()

    def log_alarm(self, alarm: Alarm) -> None:
        """Write the alarm's line to the text page."""
        self._add(alarm.step, _text(f"{ALARMS_NAME}/{alarm.rule}", f"    {alarm.line()}"))
        self._writer.flush()

    def log_attempts(self, table: SampledAttempts) -> None:
        """Write the table to the text page, as Markdown."""
        self._add(table.step, _text(TABLE_NAME, table.to_markdown()))
        self._writer.flush()

    def go_back(self, step: int) -> None:
        """Tell TensorBoard to discard everything after `step`: a START event purges later ones."""
        restart = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=restart))

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, *values: Summary.Value) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))


def _text(tag: str, text: str) -> Summary.Value:
    """Return a Markdown text for TensorBoard's text page."""
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
    return Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)


def open_tensorboard(run: TrackedRun) -> TensorboardTracker:
    """Return the tracker of a run."""
    return TensorboardTracker(run.run_dir / "tensorboard", config=run.config, restored_step=run.restored_step)
